"""Lines of keys in files of YAML or JSON, for messages about faults."""

import os
import re
from functools import cached_property, lru_cache
from typing import Any

from pipebench.errors import FileName
from pipebench.files import FileError, read_text

_MAX_BYTES = 1_000_000  # of files to find lines in; generated ones, such as profiles, may be larger


class LinedFile(FileName):
    """A file's name for messages that finds lines of keys by reading the file again, from `path` if that differs."""

    def __new__(cls, name: str, path: str | os.PathLike[str] = "") -> "LinedFile":
        """Return the name, which stores the absolute path, since the working directory may change."""
        made = super().__new__(cls, name)
        made._path = os.path.abspath(path or name)
        return made

    _path: str

    @cached_property
    def _lines(self) -> dict[str, int]:
        try:
            return _lines_of(read_text(self._path, _MAX_BYTES))
        except FileError:
            return {}

    def line_of(self, key: str) -> int | None:
        """Return the line of a key such as `rows.0.runs` or `stages[0].layers`, or of the innermost key found."""
        plain, lines = _plain(key), self._lines if key else {}
        if plain not in lines:  # perhaps a generated row, such as `rows.m$size`
            for row in (each for each in lines if "$" in each and each.count(".") == 1):
                pattern = re.sub(r"\\\$\w+", "[^.]+", re.escape(row))
                plain = re.sub(rf"^{pattern}(?=\.|$)", lambda _: row, plain)  # noqa: B023 # called at once
        while plain and plain not in lines:
            plain = plain.rpartition(".")[0]
        return lines.get(plain)


@lru_cache(maxsize=8)
def _lines_of(text: str) -> dict[str, int]:
    """Return every key's line."""
    import yaml

    lines: dict[str, int] = {}
    try:
        _note(yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), "", lines)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return lines


def _note(node: Any, inside: str, lines: dict[str, int]) -> None:
    pairs = node.value if getattr(node, "id", "") in ("mapping", "sequence") else []
    for index, pair in enumerate(pairs):
        place, value = pair if isinstance(pair, tuple) else (pair, pair)
        names = [place.value] if place is not value else [str(index)]
        if (
            place is value and "." not in inside and getattr(value, "id", "") == "mapping"
        ):  # a row is found by its name, too
            names += [given.value for name, given in value.value if name.value == "name"]
        for name in names:
            key = _plain(f"{inside}.{name}")
            lines.setdefault(key, place.start_mark.line + 1)
            _note(value, key, lines)


def _plain(key: str) -> str:
    """Return a key with its separators, brackets, quotes and dots, as single dots."""
    return re.sub(r"[\[\]'.]+", ".", key).strip(".")
