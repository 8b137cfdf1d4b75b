"""Lines of keys: where in a file of YAML or JSON the value of a key stands, so that a fault can say it."""

import os
import re
from functools import cached_property, lru_cache
from typing import Any

from pipebench.errors import FileName
from pipebench.files import FileError, read_text

_MAX_BYTES = 1_000_000  # of files whose lines are looked for; generated ones, such as profiles, may be larger


class LinedFile(FileName):
    """The name of a file as people know it; finds the lines of keys in the file, which is read again for that.

    Args:
        name: for people.
        path: of the file, where that isn't its name.
    """

    def __new__(cls, name: str, path: str | os.PathLike[str] = "") -> "LinedFile":
        """Return the name, which remembers the file's path even where the working directory changes."""
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
        """Return the line of a key such as `rows.0.runs` or `stages[0].layers`, or of the innermost that is there."""
        plain, lines = _plain(key), self._lines if key else {}
        if plain not in lines:  # a row that a list makes, perhaps, such as `rows.m$size`
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
        ):  # a row goes by its name, too
            names += [given.value for name, given in value.value if name.value == "name"]
        for name in names:
            key = _plain(f"{inside}.{name}")
            lines.setdefault(key, place.start_mark.line + 1)
            _note(value, key, lines)


def _plain(key: str) -> str:
    """Return a key without what tells its parts apart: brackets, quotes and dots are one dot."""
    return re.sub(r"[\[\]'.]+", ".", key).strip(".")
