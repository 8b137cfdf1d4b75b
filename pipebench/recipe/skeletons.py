"""What functions and classes take, read from their source: torch's optimizers are listed without importing torch.

Importing torch takes longer than everything that `pipebench ls` and `pipebench show` do. What a recipe's keys are
compared with is in the text of its files: names, parameters, annotations and defaults, which is what a skeleton keeps.
Read anew every time, it can't fall behind.
"""

import ast
import builtins
import importlib
import importlib.util
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

_METHODS = ("__init__", "step")  # what a recipe is compared with


class _AnyName(type):
    """Makes classes that stand for names of other modules: attributes and subscripts of them are such classes, too."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _standing_for(name)

    def __getitem__(cls, _key: object) -> type:
        return cls


def skeleton(target: str) -> Callable[..., Any]:
    """Return a function or class with the signatures of a target's and nothing inside, or the target itself.

    The target itself, imported, is what takes its place where a default isn't plain enough to be read.

    Args:
        target: `package.module:name` of an installed package, as pipebench itself names it.
    """
    module, _, name = target.partition(":")
    try:
        return _skeleton(module, name)
    except (LookupError, OSError, SyntaxError, NameError, TypeError, ValueError, AttributeError):
        made: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return made


def subclasses(module: str, base: str) -> list[str]:
    """Return the names of a module that are classes derived from another of its names, in the module's order."""
    names = [name for name in _definitions(module) if not name.startswith("_") and name != base]
    return [name for name in names if base in _ancestors(module, name)]


def _ancestors(module: str, name: str) -> Iterator[str]:
    found = _found(module, name)
    if found is not None and isinstance(found[1], ast.ClassDef):
        for parent in found[1].bases:
            if isinstance(parent, ast.Name):
                yield parent.id
                yield from _ancestors(found[0], parent.id)


@cache
def _skeleton(module: str, name: str) -> Callable[..., Any]:
    found = _found(module, name)
    if found is None:
        raise LookupError(name)
    where, definition = found
    if isinstance(definition, ast.FunctionDef):
        body: ast.stmt = _emptied(definition)
        parents: list[Any] = []
    else:
        methods = [each for each in definition.body if isinstance(each, ast.FunctionDef) and each.name in _METHODS]
        # Of overloads the last one counts, as in Python.
        body = ast.ClassDef(name, [], [], [*map(_emptied, methods), ast.Pass()], [])
        body.type_params = []  # type: ignore[attr-defined]  # a field from Python 3.12 on
        known = [parent.id for parent in definition.bases if isinstance(parent, ast.Name)]
        parents = [_skeleton(where, parent) for parent in known if _found(where, parent) is not None]
    tree = ast.fix_missing_locations(ast.Module([body], []))
    names = _names(where, tree)
    exec(compile(tree, f"<signatures of {where}:{name}>", "exec"), names)
    made: Callable[..., Any] = names[name]
    return type(name, (made, *parents), {}) if isinstance(made, type) and parents else made


def _emptied(function: ast.FunctionDef) -> ast.FunctionDef:
    """Return a function without what it does, is decorated with and returns."""
    empty = ast.FunctionDef(function.name, function.args, [ast.Pass()], [])
    empty.type_params = []  # type: ignore[attr-defined]  # a field from Python 3.12 on
    return empty


def _names(module: str, tree: ast.Module) -> dict[str, Any]:
    """Return what names stand for in a module's annotations and defaults: typing's, constants, or just a name."""
    constants = _constants(module)
    names: dict[str, Any] = {"__name__": module}
    for name in _used(tree) - {*vars(builtins)}:
        names[name] = constants[name] if name in constants else getattr(typing, name, None) or _standing_for(name)
    functions = (node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    defaults = [each for taken in functions for each in (*taken.defaults, *taken.kw_defaults) if each is not None]
    unknown = {name for each in defaults for name in _used(each)} - {*vars(builtins), *constants}
    if unknown:
        raise NameError(f"defaults of {module} are computed from {', '.join(sorted(unknown))}")
    return names


def _used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _standing_for(name: str) -> type:
    return _AnyName(name, (), {})


def _constants(module: str) -> dict[str, Any]:
    constants = {}
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:  # something that is computed
                constants.pop(node.targets[0].id, None)
    return constants


def _found(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef] | None:
    """Return the definition of a module's name and the module it stands in; None if it is none of a file."""
    node = _definitions(module).get(name)
    if not isinstance(node, ast.ImportFrom):
        return None if node is None else (module, node)
    source = _source(module, node)
    original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    return None if source is None else _found(source, original)


def _source(module: str, node: ast.ImportFrom) -> str | None:
    """Return the module that a statement imports from, if it is another one of the same package."""
    if node.level:
        above = module if _path(module).name == "__init__.py" else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            above = above.rpartition(".")[0]
        return f"{above}.{node.module}" if node.module else above
    same = node.module is not None and node.module.partition(".")[0] == module.partition(".")[0]
    return node.module if same and node.module != module else None  # from itself a package imports its modules


@cache
def _definitions(module: str) -> dict[str, ast.ClassDef | ast.FunctionDef | ast.ImportFrom]:
    """Return what defines or imports a name at the top of a module."""
    found: dict[str, ast.ClassDef | ast.FunctionDef | ast.ImportFrom] = {}
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
    return found


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text(encoding="utf-8"))


@cache
def _path(module: str) -> Path:
    """Return a module's file, without importing the packages that it is in, as importlib would."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        raise LookupError(module)
    if not parts:
        return Path(spec.origin)
    path = Path(spec.origin).parent.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
