"""The gettext catalogues of two packages: finding them, and reading their messages by polib."""

import gettext
import importlib.metadata
import struct
from pathlib import Path
from typing import Any

from pipebench.zoo.late import optional

# Package, version to fetch, and its German catalogue. pretalx's other one, de_Formal, has the same texts, more formal.
CATALOGUES: tuple[tuple[str, str, str], ...] = (
    ("mercurial", "7.2.4", "mercurial/locale/de/LC_MESSAGES/hg.mo"),
    ("pretalx", "2025.2.2", "pretalx/locale/de_DE/LC_MESSAGES/django.po"),
)

Pair = tuple[str, str]


def find(folder: Path | None, *, in_packages: bool = True) -> list[Path]:
    """Return the path of every catalogue.

    Args:
        folder: searched first; has catalogues under the same relative paths as the packages.
        in_packages: whether to search installed packages next.

    Raises:
        FileNotFoundError: a catalogue isn't found; says how to fetch it.
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
    """Return a catalogue's messages with their translations, in order.

    Untranslated and fuzzy messages are left out. A message with a plural form gives its singular.

    Raises:
        ImportError: polib isn't installed.
        OSError: the file isn't there.
        ValueError: it isn't a catalogue.
    """
    with optional("gettext_pairs", "polib"):
        import polib
    with path.open("rb") as file:  # opened here, since polib takes the path of a missing file for a catalogue's content
        try:
            if path.suffix == ".mo":
                gettext.GNUTranslations(file)  # raises for a truncated file, which polib would read in part
                entries = polib.mofile(str(path), encoding="utf-8")
            else:
                entries = polib.pofile(str(path), encoding="utf-8")
        except (OSError, struct.error, ValueError) as error:
            raise ValueError(f"gettext_pairs: {path} is no gettext catalogue: {error}") from error
    return [
        (entry.msgid, entry.msgstr or entry.msgstr_plural[0]) for entry in entries.translated_entries() if _said(entry)
    ]


def _installed(package: str, name: str) -> list[Path]:
    try:
        return [Path(str(importlib.metadata.distribution(package).locate_file(name)))]
    except importlib.metadata.PackageNotFoundError:
        return []


def _said(entry: Any) -> bool:
    """Return whether an entry has a translation; polib says so of all entries of a .mo file."""
    return bool(entry.msgstr or entry.msgstr_plural.get(0))
