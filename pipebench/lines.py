"""Finds the lines of keys in YAML and JSON files, for messages about faults."""

import os
import re
from functools import cached_property, lru_cache
from typing import Any

from pipebench.errors import FileName
from pipebench.files import FileError, read_text

_MAX_BYTES = 1_000_000  # larger files are generated, such as profiles, and have no lines in messages


class LinedFile(FileName):
    """A file's name in messages; finds lines of keys by reading the file at `path`, by default its name."""

    def __new__(cls, name: str, path: str | os.PathLike[str] = "") -> "LinedFile":
        """Return the name; the path is made absolute, since the working directory may change."""
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
        _add_lines(yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), "", lines)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return lines


def _add_lines(node: Any, inside: str, lines: dict[str, int]) -> None:
    """Add the lines of all keys below a YAML node; `inside` is the node's own key.

    An element of a list has its index as its key. A mapping in a list at the top, such as a report's row, can also be
    found by its `name`.
    """
    pairs = node.value if getattr(node, "id", "") in ("mapping", "sequence") else []
    for index, pair in enumerate(pairs):
        place, value = pair if isinstance(pair, tuple) else (pair, pair)
        is_element = place is value
        names = [str(index)] if is_element else [place.value]
        if is_element and "." not in inside and getattr(value, "id", "") == "mapping":
            names += [given.value for name, given in value.value if name.value == "name"]
        for name in names:
            key = _plain(f"{inside}.{name}")
            lines.setdefault(key, place.start_mark.line + 1)
            _add_lines(value, key, lines)


def _plain(key: str) -> str:
    """Return a key with single dots in place of its separators: brackets, quotes and dots."""
    return re.sub(r"[\[\]'.]+", ".", key).strip(".")
