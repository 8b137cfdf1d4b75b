"""Parameters of classes and functions read from their source, for recipes that are checked without importing torch.

Importing torch takes ten times as long as all that `pipebench ls` and `pipebench show` do, which work where it can't be
imported.
"""

import __future__

import ast
import functools
import importlib
import sys
import typing
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_Definition = ast.ClassDef | ast.FunctionDef | ast.Assign


@functools.cache
def bare(target: str) -> Callable[..., Any]:
    """Return a function with the signature of a target, `package.module:name`, and nothing else.

    Of a class, it has the signature of `__init__`. Parameters that take a number or a tensor take a number. If the
    source isn't there or is in a form that isn't read here, the target is imported.
    """
    module, _, name = target.partition(":")
    try:
        return _read(module, name)
    except (LookupError, OSError, ValueError):
        made = getattr(importlib.import_module(module), name)
        is_class = isinstance(made, type)
        return typing.cast(Callable[..., Any], made.__init__ if is_class else made)


def _read(module: str, name: str) -> Callable[..., Any]:
    module, found = _find(module, name)
    if isinstance(found, ast.ClassDef):
        made = [each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        found = made[-1]  # those before it are overloads
    if not isinstance(found, ast.FunctionDef) or found.decorator_list:
        raise LookupError(f"{name} of {module} is no plain function")
    names = {**vars(typing), "Tensor": float}
    for default in filter(None, (*found.args.defaults, *found.args.kw_defaults)):
        names |= {each.id: _constant(module, each.id) for each in ast.walk(default) if isinstance(each, ast.Name)}
    code = ast.parse(f"def {found.name}(): ...")
    code.body[0].args = found.args  # type: ignore[attr-defined]
    exec(compile(code, name, "exec", __future__.annotations.compiler_flag), names)
    return typing.cast(Callable[..., Any], names[found.name])


def _constant(module: str, name: str) -> object:
    _, found = _find(module, name)
    if not isinstance(found, ast.Assign):
        raise LookupError(f"{name} of {module} is no constant")
    return ast.literal_eval(found.value)


def _find(module: str, name: str) -> tuple[str, _Definition]:
    """Return the definition of a module's name, and the module that has it: names may be imported from others."""
    for node in _source(module).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() if node.name == name:
                return module, node
            case ast.Assign(targets=[ast.Name(id=assigned)]) if assigned == name:
                return module, node
            case ast.ImportFrom(module=str(other), names=imported):
                for each in imported:
                    if name == (each.asname or each.name):
                        return _find(other, each.name)
    raise LookupError(f"{module} defines no {name}")


@functools.cache
def _source(module: str) -> ast.Module:
    """Return a module's source; none of the packages that it is in is imported."""
    first, *parts = module.split(".")
    spec = getattr(sys.modules.get(first), "__spec__", None) or PathFinder.find_spec(first)
    for part in parts:
        spec = PathFinder.find_spec(part, spec.submodule_search_locations if spec else ())
    return ast.parse(Path(str(spec and spec.origin)).read_bytes())
