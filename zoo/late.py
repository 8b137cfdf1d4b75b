"""What is imported late: torch, when something of it is first used, and packages that few need.

What a data set is doesn't need torch, what it holds does; checking a recipe and planning from a cached profile take a
tenth of the time of torch's import.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, attribute: str) -> Any:
            found = getattr(importlib.import_module("torch"), attribute)
            setattr(self, attribute, found)  # the next time it is simply there
            return found

    torch = _Torch()


@contextmanager
def optional(user: str, package: str) -> Iterator[None]:
    """Import, inside, an optional package that `user` needs.

    Raises:
        ImportError: the package is missing; says how to install it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f'{user} needs the package {package}: pip install "pipebench[data]"') from error
