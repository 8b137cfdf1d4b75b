"""Modules that are imported when they are first used: what a data set is doesn't need torch, what it holds does.

Listing the zoo, checking a recipe against it and planning from what is known take a tenth of the time that torch's
import takes.
"""

import importlib
from typing import Any


class Late:
    """Stands for a module; the first attribute that is asked of it imports it.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
