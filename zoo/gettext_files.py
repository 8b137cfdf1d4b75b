"""Gettext catalogues: where those of two packages lie, and their messages, which polib reads in both formats."""

import gettext
import importlib.metadata
import struct
from pathlib import Path
from typing import Any

from pipebench.zoo.late import optional

# Package, version fetched, and its German catalogue. pretalx's second one, de_Formal, says the same to a stranger.
CATALOGUES: tuple[tuple[str, str, str], ...] = (
    ("mercurial", "7.2.4", "mercurial/locale/de/LC_MESSAGES/hg.mo"),
    ("pretalx", "2025.2.2", "pretalx/locale/de_DE/LC_MESSAGES/django.po"),
)

Pair = tuple[str, str]


def find(folder: Path | None, *, in_packages: bool = True) -> list[Path]:
    """Return where every catalogue is: in the folder, or else in an installed package, if these are searched.

    The folder holds catalogues as packages do.

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
        ImportError: polib isn't installed.
        OSError: the file isn't there.
        ValueError: it isn't a catalogue.
    """
    polib = _polib()
    with path.open("rb") as file:  # polib takes the name of a file that isn't there for a catalogue's content
        try:
            if path.suffix == ".mo":
                gettext.GNUTranslations(file)  # polib reads one that is cut off as far as it goes
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
    """Return whether an entry has a translation; polib takes all of a .mo file for translated."""
    return bool(entry.msgstr or entry.msgstr_plural.get(0))


def _polib() -> Any:
    with optional("gettext_pairs", "polib"):
        import polib
    return polib
