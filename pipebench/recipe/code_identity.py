"""Hashes the user's own modules that a recipe runs: those of its targets, and all that they import.

The hashes show whether a recorded result is still valid, and whether a checkpoint was written by the same code. Imports
are found in the source and not executed, so hashes don't depend on what has run before.
"""

import ast
import hashlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.targets import find_new_files, targets_of
from pipebench.recipe.users_code import is_users

_IMPORTERS = ("import_module", "__import__")


def code_hashes(loaded: LoadedRecipe) -> dict[str, str]:
    """Return the SHA-256 of each of the user's own modules that a recipe's targets import, by module name.

    Imports inside functions count. If a module imports a computed name, all modules beside it count. Data files and
    installed code (the standard library, packages, pipebench) don't.
    """
    find_new_files()
    targets = (target.partition(":")[0] for _, target in targets_of(asdict(loaded.recipe)))
    found = _Modules([*map(str, loaded.folders), *sys.path])
    for name in targets:
        found.add(name)
    return dict(sorted(found.hashes.items()))


class _Place(NamedTuple):
    """Location of a module."""

    file: Path | None  # None for a package without `__init__.py`
    folders: Sequence[str]  # where a package's modules are; empty for other modules


class _Modules:
    """The user's modules that some modules import, directly or not; `search` are the folders to look in, in order."""

    def __init__(self, search: Sequence[str]) -> None:
        self.hashes: dict[str, str] = {}  # by module name
        self._search = search
        self._places: dict[str, _Place | None] = {}

    def add(self, name: str) -> None:
        """Add a module, its packages and all modules that these import, as far as they are the user's."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name in self._places:
                continue
            package = name.rpartition(".")[0]
            if package and package not in self._places:
                waiting += [name, package]  # the package first, whose folders say where the module is
                continue
            self._places[name] = place = self._found(name, package)
            if place is not None and place.file is not None:
                content = place.file.read_bytes()
                self.hashes[name] = hashlib.sha256(content).hexdigest()
                if place.file.suffix == ".py":
                    waiting += _imported(place.file.parent, content, name if place.folders else package)

    def _found(self, name: str, package: str) -> _Place | None:
        """Return a module's location; None if not found or in a library."""
        above = self._places.get(package)
        if package and (above is None or not above.folders):  # the name of a function or class in a module
            return None
        folders = self._search if above is None else above.folders
        try:
            spec = PathFinder.find_spec(name, folders)
        except KeyError:  # a package without `__init__.py`, in a package that isn't imported
            inner = [os.path.join(folder, name.rpartition(".")[2]) for folder in folders]
            return _Place(None, [folder for folder in inner if os.path.isdir(folder)])
        if spec is None and not package:  # editable installs may have finders of their own
            with suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        inner = [*(spec.submodule_search_locations or ())]
        if spec.origin is None:
            return _Place(None, inner)
        return _Place(Path(spec.origin), inner) if os.path.isfile(spec.origin) and is_users(spec.origin) else None


def _imported(folder: Path, source: bytes, package: str) -> Iterator[str]:
    """Yield the full names of all that a module in a folder may import, including functions of other modules."""
    names, is_computed = _imports(source, package)
    yield from names
    if is_computed:
        yield from (each.name for each in _beside(folder, f"{package}." if package else ""))


@cache  # a run asks twice, and so does every run of a comparison; those of large code have thousands of modules
def _imports(source: bytes, package: str) -> tuple[Sequence[str], bool]:
    """Return the full names that a module of a package imports, and whether it also imports a computed name."""
    names: dict[str, None] = {}
    is_computed = False
    try:
        nodes = ast.walk(ast.parse(source))
    except (SyntaxError, ValueError):
        return (), False
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if base := _absolute("." * node.level + (node.module or ""), package):
                names |= dict.fromkeys([base, *(f"{base}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Call) and _called(node.func) in _IMPORTERS and node.args:
            given = node.args[0]
            if not isinstance(given, ast.Constant):
                is_computed = True
            elif base := _absolute(str(given.value), package):
                names[base] = None
    return tuple(names), is_computed


def _called(function: ast.expr) -> str:
    """Return the name by which a function is called."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _absolute(name: str, package: str) -> str:
    """Return a module's full name; "" for one above all packages."""
    with suppress(ImportError, ValueError):
        return importlib.util.resolve_name(name, package or None)
    return ""


def _beside(folder: Path, prefix: str) -> Iterator[pkgutil.ModuleInfo]:
    """Yield the modules in a folder and in its packages."""
    for each in pkgutil.iter_modules([str(folder)], prefix):
        yield each
        if each.ispkg:
            yield from _beside(folder / each.name.rpartition(".")[2], f"{each.name}.")
