"""Lets torch's Python functions run without importing torch's compiler, which takes over a second and 150 MB.

torch excludes some of its functions from compilation. When one of them is first called, it imports the compiler to say
so, even if nothing is ever compiled.
"""

import inspect
from collections.abc import Iterable
from contextlib import suppress
from types import FunctionType

from torch._compile import _disable_dynamo

_IMPORTS_COMPILER = _disable_dynamo(lambda: None).__code__  # the code of torch's wrapper of all such functions


def without_compiler(functions: Iterable[object]) -> None:
    """Let functions, and those that they wrap, run without the compiler's import; skip what isn't a function.

    torch's wrapper stores the function to call on the wrapped function once it has asked the compiler, and doesn't ask
    again. Here it is stored beforehand. If another version of torch does so in another way, the import happens, which
    only costs time.
    """
    waiting, seen = [*functions], set[int]()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if function.__code__ is _IMPORTS_COMPILER:
            plain = inspect.getclosurevars(function).nonlocals.get("fn")
            if isinstance(plain, FunctionType):
                plain.__dynamo_disable = plain  # type: ignore[attr-defined]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)
