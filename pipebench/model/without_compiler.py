"""Lets torch's Python functions run without torch's compiler, whose import takes over a second and 150 MB.

torch tells its compiler to stay away from some functions, and imports it for that when one of them is first called.
"""

import inspect
from collections.abc import Iterable
from contextlib import suppress
from types import FunctionType

from torch._compile import _disable_dynamo

_ASKS = _disable_dynamo(lambda: None).__code__  # of all functions that import the compiler


def without_compiler(functions: Iterable[object]) -> None:
    """Let functions, and those that they wrap, run as they are; what isn't a function is passed over.

    A function that asks the compiler keeps its answer, the function to call instead, and doesn't ask again. Where a
    version of torch does that otherwise, its functions go on asking, which takes time only.
    """
    waiting, seen = [*functions], set[int]()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if function.__code__ is _ASKS:
            plain = inspect.getclosurevars(function).nonlocals.get("fn")
            if isinstance(plain, FunctionType):
                plain.__dynamo_disable = plain  # type: ignore[attr-defined]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)
