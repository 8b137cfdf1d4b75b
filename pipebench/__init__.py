"""pipebench: which way of parallelising training reaches the target accuracy first, and what does it cost?

`pipebench.run("quickstart")` trains a recipe; `plan`, `profile`, `simulate` and `compare` do what their commands do.
What they need is imported when one is first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

TYPE_CHECKING = False  # to import typing's takes longer than all else here, and inspect five times as long as that
if TYPE_CHECKING:
    import inspect
    from typing import Any

__version__ = "0.2.0"
_FUNCTIONS = ("compare", "load_recipe", "plan", "profile", "recorded", "run", "simulate")
_ERRORS = ("RecipeError", "UserError")

if not os.path.isdir(os.path.join(__path__[0], "zoo")):  # the link of a checkout where there are none, as on Windows
    __path__.append(os.path.dirname(os.path.abspath(__path__[0])))


def __getattr__(name: str) -> Any:
    """Import what a name stands for; their types are in `__init__.pyi`."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module("pipebench.cli.api"), name)
    if name in _ERRORS:
        return getattr(importlib.import_module("pipebench.errors"), name)
    raise AttributeError(f"module 'pipebench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *_FUNCTIONS, *_ERRORS))


class _Called(ModuleType):
    """A package that has the name of a function, and can be called like it."""

    def __call__(self, *args: Any, **keys: Any) -> Any:
        return self._function(*args, **keys)

    @property
    def __signature__(self) -> inspect.Signature:  # for `help` and IPython
        import inspect

        return inspect.signature(self._function)

    @property
    def _function(self) -> Any:
        return __getattr__(self.__name__.rpartition(".")[2])


def make_callable(name: str) -> None:
    """Let a package of this full name be called as the function of its name."""
    sys.modules[name].__class__ = _Called
