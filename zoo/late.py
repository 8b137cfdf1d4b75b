"""torch, imported when something of it is first used: what a data set is doesn't need it, what it holds does.

Checking a recipe and planning from a cached profile take a tenth of the time of torch's import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module("torch"), attribute)

    torch = _Torch()
