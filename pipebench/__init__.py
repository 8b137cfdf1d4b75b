"""pipebench: which way of parallelising training reaches the target accuracy first, and what does it cost?

`pipebench.run("quickstart")` trains a recipe; `plan`, `profile`, `simulate` and `compare` do what their commands do.
Each function is imported when it is first used, with all that it needs.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

TYPE_CHECKING = False  # importing typing takes longer than all else here, and inspect five times as long as typing
if TYPE_CHECKING:
    import inspect
    from typing import Any

__version__ = "0.2.0"
_FUNCTIONS = ("compare", "load_recipe", "plan", "profile", "recorded", "run", "simulate")
_ERRORS = ("RecipeError", "UserError", "WorkersFailedError")

if not os.path.isdir(os.path.join(__path__[0], "zoo")):  # in a checkout zoo is a link, which Windows doesn't make
    __path__.append(os.path.dirname(os.path.abspath(__path__[0])))


def __getattr__(name: str) -> Any:
    """Import a function or an error by its name; `__init__.pyi` has their types."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module("pipebench.cli.api"), name)
    if name in _ERRORS:
        return getattr(importlib.import_module("pipebench.errors"), name)
    raise AttributeError(f"module 'pipebench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *_FUNCTIONS, *_ERRORS))


class _CallableModule(ModuleType):
    """A package that can be called as the function of the same name, such as `pipebench.run`."""

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
    """Make an imported package callable as the function of the same name.

    Python binds `pipebench.run` to the package once it is imported, in place of the function.
    """
    sys.modules[name].__class__ = _CallableModule
