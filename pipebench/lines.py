"""Lines of keys: where in a file of YAML or JSON the value of a key stands, so that a fault can say it."""

import os
import re
from collections.abc import Iterator
from functools import lru_cache
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

    def line_of(self, key: str) -> int | None:
        """Return the line of a key such as `rows.0.runs` or `stages[0].layers`, or of the innermost that is there."""
        try:
            return _line(read_text(self._path, _MAX_BYTES), key) if key else None
        except FileError:
            return None


@lru_cache(maxsize=64)
def _line(text: str, key: str) -> int | None:
    import yaml

    try:
        node = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    line, rest = None, key.replace("[", ".").replace("]", "")
    while (found := next(_steps(node, rest), None)) is not None:
        line, node, rest = found
    return line


def _steps(node: Any, rest: str) -> Iterator[tuple[int, Any, str]]:
    """Yield lines and values of what a key's rest may begin with, and the rest after that; names may hold dots."""
    pairs = node.value if getattr(node, "id", "") in ("mapping", "sequence") else []
    for index, pair in enumerate(pairs):
        place, value = pair if isinstance(pair, tuple) else (pair, pair)
        for name in _names(place) if place is not value else (str(index), *_own_names(value)):
            of_rows = re.sub(r"\\\$\w+", r"[^.]+", re.escape(name))  # of a report, that a list makes: m$size
            if found := re.match(rf"{of_rows}(\.|$)", rest):
                yield place.start_mark.line + 1, value, rest[found.end() :]


def _names(node: Any) -> tuple[str, ...]:
    return (node.value, repr(node.value)) if isinstance(node.value, str) else ()


def _own_names(item: Any) -> tuple[str, ...]:
    """Return how an item of a list is called besides its place: a row of a report by its key `name`."""
    pairs = item.value if getattr(item, "id", "") == "mapping" else []
    return next((_names(value) for name, value in pairs if name.value == "name"), ())
