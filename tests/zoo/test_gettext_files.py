"""Gettext catalogues: read as by Python's own gettext, found in a folder or in packages."""

import gettext
import importlib.metadata
import struct
import sys
from pathlib import Path

import pytest

from pipebench.zoo import gettext_files

MESSAGES = {
    "add files": "fügt Dateien hinzu",
    "one\ntwo": "eins\nzwei",
    "unsaid": "",
    "": "Content-Type: charset=UTF-8\n",
}
PO = r"""# a comment
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"

#: where.py:11
msgid "Thank you!"
msgstr "Danke!"

msgid ""
"two "
"lines\n"
msgstr ""
"zwei "
"Zeilen\n"

#, python-format, fuzzy
msgid "unsure"
msgstr "unsicher"

msgid "untranslated"
msgstr ""

msgctxt "noun"
msgid "say \"so\""
msgstr "sag \"so\" \\ dann"

msgid "session"
msgid_plural "sessions"
msgstr[0] "Vortrag"
msgstr[1] "Vorträge"

#~ msgid "obsolete"
#~ msgstr "überholt"
"""


def mo(messages: dict[str, str], order: str = "<") -> bytes:
    """Return a binary catalogue, as gettext's msgfmt writes it."""
    rows = sorted((key.encode(), value.encode()) for key, value in messages.items())
    place = 28 + 16 * len(rows)
    tables: tuple[list[int], list[int]] = ([], [])
    strings = b""
    for table, column in zip(tables, (0, 1), strict=True):
        for row in rows:
            table += [len(row[column]), place + len(strings)]
            strings += row[column] + b"\0"
    head = struct.pack(f"{order}7I", 0x950412DE, 0, len(rows), 28, 28 + 8 * len(rows), 0, 0)
    return head + struct.pack(f"{order}{4 * len(rows)}I", *tables[0], *tables[1]) + strings


def write(folder: Path) -> list[Path]:
    """Write small catalogues under the paths that they have in packages."""
    paths = [folder / name for _, _, name in gettext_files.CATALOGUES]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_bytes(mo(MESSAGES) if path.suffix == ".mo" else PO.encode())
    return paths


@pytest.mark.parametrize("order", ["<", ">"])
def test_binary_catalogues_are_read_as_python_reads_them(tmp_path: Path, order: str) -> None:
    path = tmp_path / "hg.mo"
    path.write_bytes(mo({**MESSAGES, "menu\4open": "öffnen", "file\0files": "Datei\0Dateien"}, order))
    found = dict(gettext_files.read(path))
    assert found == {
        "add files": "fügt Dateien hinzu", "one\ntwo": "eins\nzwei", "open": "öffnen", "file": "Datei"
    }  # fmt: skip
    with path.open("rb") as file:
        oracle = gettext.GNUTranslations(file)
    assert {key: oracle.gettext(key) for key in ("add files", "one\ntwo")}.items() <= found.items()
    assert oracle.pgettext("menu", "open") == found["open"]
    assert oracle.ngettext("file", "files", 1) == found["file"]


def test_text_catalogues(tmp_path: Path) -> None:
    path = tmp_path / "django.po"
    path.write_text(PO, encoding="utf-8")
    assert gettext_files.read(path) == [
        ("Thank you!", "Danke!"),
        ("two lines\n", "zwei Zeilen\n"),
        ('say "so"', 'sag "so" \\ dann'),
        ("session", "Vortrag"),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("hg.mo", b""),
        ("hg.mo", b"no catalogue at all"),
        ("hg.mo", mo(MESSAGES)[:40]),
        ("hg.mo", mo(MESSAGES)[:-20]),
        ("django.po", b"<html>\n"),
        ("django.po", b'"a string that nothing begins"\n'),
        ("django.po", b'msgid "\xff"\n'),
    ],
)
def test_damaged_catalogues_are_one_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^gettext_pairs: .*{name} is no gettext catalogue: "):
        gettext_files.read(path)


def test_a_folder_comes_before_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        def __init__(self, name: str) -> None:
            self.name = name

        def locate_file(self, path: str) -> Path:
            return tmp_path / "packages" / path

    in_folder, in_packages = write(tmp_path / "folder"), write(tmp_path / "packages")
    monkeypatch.setattr(importlib.metadata, "distribution", Distribution)
    assert gettext_files.find(tmp_path / "folder") == in_folder
    assert gettext_files.find(None) == in_packages
    in_folder[1].unlink()
    assert gettext_files.find(tmp_path / "folder") == [in_folder[0], in_packages[1]]
    with pytest.raises(
        FileNotFoundError, match=r"^gettext_pairs: pretalx/\S+ not found in \S+folder: set PIPEBENCH_DATA"
    ):
        gettext_files.find(tmp_path / "folder", in_packages=False)


def test_missing_catalogues_of_packages_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    wanted = (
        r"^gettext_pairs: mercurial/locale/de/LC_MESSAGES/hg\.mo and pretalx/locale/de_DE/LC_MESSAGES/django\.po "
        r"not found in an installed package: set PIPEBENCH_DATA to a folder for data and run nox -s data, "
        r"which fetches catalogues into it, or set the option root to a folder of them$"
    )
    with pytest.raises(FileNotFoundError, match=wanted):
        gettext_files.find(None)


def test_without_polib_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polib", None)
    with pytest.raises(
        ImportError, match=r"^gettext_pairs needs the package polib: pip install \"pipebench\[data\]\"$"
    ):
        gettext_files.read(write(tmp_path)[0])


def test_a_missing_file_is_not_reported_as_damaged(tmp_path: Path) -> None:
    for name in ("hg.mo", "django.po"):
        with pytest.raises(FileNotFoundError):
            gettext_files.read(tmp_path / name)
