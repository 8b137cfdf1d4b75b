"""Parameters of classes and functions read from their source, for recipes that are checked without importing torch.

Importing torch takes ten times as long as all that `pipebench ls` and `pipebench show` do, which work where it can't be
imported.
"""

import __future__

import ast
import functools
import sys
import typing
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

_Definition = ast.ClassDef | ast.FunctionDef | ast.Assign


@functools.cache
def bare(target: str) -> Callable[..., None]:
    """Return a function with the signature of a target, `package.module:name`, and nothing else.

    Of a class, it has the signature of `__init__`. Parameters that take a number or a tensor take a number.
    """
    module, found = _find(*target.split(":"))
    if isinstance(found, ast.ClassDef):
        found = next(each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    assert isinstance(found, ast.FunctionDef)
    names = {**vars(typing), "Tensor": float}
    for default in filter(None, (*found.args.defaults, *found.args.kw_defaults)):
        names |= {each.id: _constant(module, each.id) for each in ast.walk(default) if isinstance(each, ast.Name)}
    code = ast.parse(f"def {found.name}(): ...")
    code.body[0].args = found.args  # type: ignore[attr-defined]
    exec(compile(code, target, "exec", __future__.annotations.compiler_flag), names)
    return typing.cast(Callable[..., None], names[found.name])


def _constant(module: str, name: str) -> object:
    _, found = _find(module, name)
    assert isinstance(found, ast.Assign)
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
        assert spec is not None
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    assert spec is not None
    return ast.parse(Path(str(spec.origin)).read_bytes())
