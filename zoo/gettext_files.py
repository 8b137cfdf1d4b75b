"""Gettext catalogues: where those of two packages lie, and readers of both formats.

Python's own gettext translates single messages of a .mo file; it has no way to list them and doesn't read .po.
"""

import importlib.metadata
import re
import struct
from collections.abc import Iterator
from pathlib import Path

# Package, version fetched, and its German catalogue. pretalx's second one, de_Formal, says the same to a stranger.
CATALOGUES: tuple[tuple[str, str, str], ...] = (
    ("mercurial", "7.2.4", "mercurial/locale/de/LC_MESSAGES/hg.mo"),
    ("pretalx", "2025.2.2", "pretalx/locale/de_DE/LC_MESSAGES/django.po"),
)
_MO_MAGIC = 0x950412DE
_PO_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"\s*$')
_PO_KEYWORD = re.compile(r"(msgctxt|msgid_plural|msgid|msgstr(?:\[(\d+)\])?)\s+(?=\")")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}

Pair = tuple[str, str]


def find(folder: Path | None, *, in_packages: bool = True) -> list[Path]:
    """Return where every catalogue is: in the folder, or else in an installed package.

    Args:
        folder: holds catalogues as packages do; None: only packages are searched.
        in_packages: whether packages are searched.

    Raises:
        FileNotFoundError: one is in neither; says how to fetch it.
    """
    found, missing = [], []
    for package, _, name in CATALOGUES:
        places = [folder / name] if folder is not None else []
        places += _installed(package, name) if in_packages else []
        there = [place for place in places if place.is_file()]
        found += there[:1]
        missing += [] if there else [name]
    if missing:
        looked = [str(folder)] if folder is not None else []
        looked += ["an installed package"] if in_packages else []
        raise FileNotFoundError(
            f"gettext_pairs: {' and '.join(missing)} not found in {' or '.join(looked)}: set PIPEBENCH_DATA to a "
            "folder for data and run nox -s data, which fetches catalogues into it, or set the option root to a folder "
            "of them"
        )
    return found


def read(path: Path) -> list[Pair]:
    """Return a catalogue's messages with their translations, in its order; untranslated and unsure ones are left out.

    Of a message with a plural form, the singular is returned.

    Raises:
        OSError: the file can't be read.
        ValueError: it isn't a catalogue.
    """
    try:
        return list(_read_mo(path.read_bytes()) if path.suffix == ".mo" else _read_po(path.read_text(encoding="utf-8")))
    except (struct.error, UnicodeDecodeError, IndexError, KeyError, ValueError) as error:
        raise ValueError(f"gettext_pairs: {path} is no gettext catalogue: {error}") from error


def _installed(package: str, name: str) -> list[Path]:
    try:
        return [Path(str(importlib.metadata.distribution(package).locate_file(name)))]
    except importlib.metadata.PackageNotFoundError:
        return []


def _read_mo(content: bytes) -> Iterator[Pair]:
    """Yield the messages of a binary catalogue (GNU gettext manual, section "The Format of GNU MO Files")."""
    order = next((each for each in "<>" if struct.unpack(f"{each}I", content[:4])[0] == _MO_MAGIC), None)
    if order is None:
        raise ValueError("it doesn't start as one")
    number, messages, translations = struct.unpack(f"{order}3I", content[8:20])
    for row in range(number):
        message, translation = (
            _mo_string(content, struct.unpack(f"{order}2I", content[table + 8 * row : table + 8 * row + 8]))
            for table in (messages, translations)
        )
        text = message.split("\0")[0].split("\4")[-1]  # the singular, without context
        if text and translation:
            yield text, translation.split("\0")[0]


def _mo_string(content: bytes, place: tuple[int, ...]) -> str:
    length, start = place
    if start + length > len(content):
        raise ValueError("it is cut off")
    return content[start : start + length].decode()


def _read_po(content: str) -> Iterator[Pair]:
    """Yield the messages of a text catalogue (GNU gettext manual, section "The Format of PO Files")."""
    for entry in re.split(r"\n\s*\n", content):
        lines = [line.strip() for line in entry.splitlines()]
        if any(line.startswith("#,") and "fuzzy" in line for line in lines):
            continue
        fields: dict[str, str] = {}
        field = ""
        for line in lines:
            if not line or line.startswith("#"):
                continue
            keyword = _PO_KEYWORD.match(line)
            if keyword:
                field = keyword[1]
                fields[field] = ""
            string = _PO_STRING.search(line, keyword.end() if keyword else 0)
            if string is None or not field:
                raise ValueError(f"{line[:40]!r} is no line of one")
            fields[field] += re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), string[1])
        translation = fields.get("msgstr", fields.get("msgstr[0]", ""))
        if fields.get("msgid") and translation:
            yield fields["msgid"], translation
