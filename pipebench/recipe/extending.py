"""`extends`: the chain of files, each a base for the next, of recipes and clusters alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipebench.errors import Fault, RecipeError
from pipebench.recipe.catalog import display
from pipebench.recipe.typecheck import shown
from pipebench.recipe.yaml_file import read_mapping

EXTENDS = "extends"


def chain(path: Path, what: str, find: Callable[[str, Path], Path]) -> list[tuple[Path, dict[Any, Any]]]:
    """Return the files of an `extends` chain with their other content, the base first.

    `path` is the last file and `what` it is, for messages: `recipe`. `find` resolves a reference in a file's folder.

    Raises a RecipeError if a file can't be read, isn't there, or extends itself.
    """
    found: list[tuple[Path, dict[Any, Any]]] = []
    seen: list[Path] = []
    following: Path | None = path
    while following is not None:
        if following.resolve() in seen:
            circle = " -> ".join(display(file) for file, _ in [*found[::-1], (following, {})])
            raise RecipeError([Fault(display(path), EXTENDS, f"goes round in a circle: {circle}")])
        seen.append(following.resolve())
        data = read_mapping(following)
        base = data.pop(EXTENDS, None)
        found.insert(0, (following, data))
        following = None if base is None else _base(base, following, what, find)
    return found


def _base(given: object, file: Path, what: str, find: Callable[[str, Path], Path]) -> Path:
    if not isinstance(given, str):
        problem = f"got {shown(given)}, allowed is a file beside this one or the short name of a {what}"
        raise RecipeError([Fault(display(file), EXTENDS, problem)])
    try:
        found = find(given, file.parent)
    except RecipeError as error:
        raise RecipeError([Fault(display(file), EXTENDS, f"{each}") for each in error.faults]) from error
    if found.is_dir():
        raise RecipeError([Fault(display(file), EXTENDS, f"got {given!r}, which is a folder; a file is needed")])
    return found
