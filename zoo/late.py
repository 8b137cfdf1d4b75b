"""Late imports: of torch, at its first use, and of optional packages.

To describe a data set (its sizes, fields and metrics), torch isn't needed; to fetch samples it is. Checking a recipe
and planning from a cached profile, which need descriptions only, take a tenth of the time of torch's import.
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
            setattr(self, attribute, found)  # so that this method isn't called again for it
            return found

    torch = _Torch()


@contextmanager
def optional(user: str, package: str) -> Iterator[None]:
    """Surround an import of an optional package that `user`, a data set or metric, needs.

    Raises:
        ImportError: the package is missing; says how to install it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f'{user} needs the package {package}: pip install "pipebench[data]"') from error
