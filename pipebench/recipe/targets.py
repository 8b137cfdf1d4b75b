"""Targets: functions and classes that a recipe names as `package.module:function`."""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from pipebench.errors import UserCodeError, nearest
from pipebench.recipe.users_code import users_code

TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
ALLOWED = "package.module:function"
_IMPORTED: set[str] = set()  # modules and packages of targets


def is_target(value: object) -> bool:
    """Return whether a value has the form of a target."""
    return isinstance(value, str) and TARGET.fullmatch(value) is not None


def import_target(target: str, folders: Sequence[Path] = ()) -> Callable[..., Any]:
    """Return the function or class of a target `package.module:function`.

    The module is searched in `folders` first, then in the working directory and where Python searches. It stays
    imported, and later calls without `folders` return the function of this module.

    Raises:
        UserCodeError: there is no such module, the module has no such function, or importing it raises.
    """
    module_name, _, function_name = target.partition(":")
    with users_code(f"{target} can't be imported"):
        module = _module(module_name, folders)
    function = getattr(module, function_name, None)
    if function is None:
        names = [name for name in dir(module) if not name.startswith("_")]
        raise UserCodeError(
            f"{target} can't be imported: module {module_name} has no function {function_name}"
            f"{nearest(function_name[:60], names)}"
        )
    if not callable(function) or not (isinstance(function, type | partial) or hasattr(function, "__name__")):
        raise UserCodeError(f"{target} is a {type(function).__name__}, needed is a function or a class that makes one")
    made: Callable[..., Any] = function
    return made


def targets_of(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield key and target for every target in a recipe's plain data."""
    dataset, train = recipe["dataset"], recipe["train"]
    places = {
        "model.target": recipe["model"].get("target"),
        "dataset.target": dataset.get("target"),
        "train.optimizer.target": train["optimizer"]["target"],
        "train.schedule.target": train["schedule"]["target"],
    }
    if dataset.get("target") is not None:
        places["dataset.loss"] = target_in(dataset.get("loss"))
        places["dataset.mean_over"] = target_in(dataset.get("mean_over"))
        metrics = dataset.get("metrics")
        for name, given in metrics.items() if isinstance(metrics, dict) else ():
            places[f"dataset.metrics.{name}"] = target_in(given)
    yield from ((key, target) for key, target in places.items() if target is not None)


def target_in(given: object) -> str | None:
    """Return the target of a loss or metric, given alone or as a mapping with arguments; None for a name."""
    target = given.get("target") if isinstance(given, dict) else given
    return target if isinstance(target, str) and is_target(target) else None


def _module(name: str, folders: Sequence[Path]) -> ModuleType:
    """Import a module, preferring the user's folders over installed ones."""
    top = name.partition(".")[0]
    if top in _IMPORTED and top in sys.modules and not folders:
        return importlib.import_module(name)
    paths = [str(folder) for folder in dict.fromkeys([*folders, Path.cwd()])]
    found = PathFinder.find_spec(top, paths)
    if found is None or found.origin is None:  # missing, or a folder without `__init__.py`
        found = None
    elif top in sys.modules and not _is_from(sys.modules[top], found):
        taken = getattr(sys.modules[top], "__file__", None) or "a part of Python"
        raise ImportError(f"{found.origin} has the name of another module in use, {taken}: rename one of them")
    before = [] if found is None or found.origin is None else [_folder_of(found)]
    if before:  # before its folder comes first on the path, where a file called torch.py would be taken for torch
        import torch  # noqa: F401  # and all that it imports
    try:
        with _first_on_path(before):
            module = importlib.import_module(name)
        _IMPORTED.add(top)
        return module
    finally:
        sys.path.extend(path for path in [*before, *paths] if path not in sys.path)


def find_new_files() -> None:
    """Let Python find modules that were written a moment ago, also while other threads import, as tracking does."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread's import changed the finders during iteration
            importlib.invalidate_caches()
            return


def _folder_of(found: ModuleSpec) -> str:
    """Return the folder on the search path that holds a module or package."""
    origin = Path(str(found.origin))
    return str(origin.parent.parent if found.submodule_search_locations else origin.parent)


@contextlib.contextmanager
def _first_on_path(folders: Sequence[str]) -> Iterator[None]:
    """Put a module's folder first on the path, as for a script, so that it can import modules beside it."""
    find_new_files()
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(folder)


def _is_from(module: ModuleType, found: ModuleSpec) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(file) == os.path.realpath(str(found.origin))
