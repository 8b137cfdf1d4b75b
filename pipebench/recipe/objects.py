"""Models, data sets and functions that a script passes to `pipebench.run`, under names that recipes have as targets.

They live as long as this process, so a recipe that names one runs only in it.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike, fspath
from typing import Any

from pipebench.errors import UserError
from pipebench.zoo.late import torch

_SECTIONS = ("model", "dataset")
_PLAIN = (str, int, float, bool, type(None))
_objects: dict[str, tuple[Any, Callable[..., Any]]] = {}  # name to object, and to the function that returns it


def __getattr__(name: str) -> Any:
    """Return the function that returns an object, so that `module:name` is a target like those of files."""
    if name in _objects:
        return _objects[name][1]
    if name.startswith("__"):
        raise AttributeError(name)
    raise UserError(
        f"{__name__}:{name} was an object of a process that has ended; write it in a file, and name its "
        "module:function in the recipe"
    )


def with_names(keys: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return a recipe, or some of its keys, as plain data with targets for objects, and the sections that are objects.

    Raises:
        UserError: a value is neither plain data nor something that can be a target.
    """
    plain = {key: _plain(value, tuple(key.split("."))) for key, value in keys.items()}
    given = {section: plain[section] for section in _SECTIONS if isinstance(plain.get(section), dict)}
    own = {section for section, keys in given.items() if str(keys.get("target")).startswith(f"{__name__}:")}
    return plain, own


def _plain(value: Any, key: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each, (*key, str(name))) for name, each in value.items()}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, list | tuple) and not _is_data(value, key):
        return [_plain(each, key) for each in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()  # NumPy's or torch's number
    target = f"{__name__}:{_stored(value, key)}"
    return {"target": target} if key in {(section,) for section in _SECTIONS} else target


def _is_data(value: Sequence[Any], key: tuple[str, ...]) -> bool:
    """Return whether a list is a pair of data sets; other lists are plain data, or values of a sweep."""
    return key in (("dataset",), ("dataset", "target")) and not all(
        isinstance(each, (*_PLAIN, Mapping)) for each in value
    )


def _stored(value: Any, key: tuple[str, ...]) -> str:
    """Store an object, unless it is stored already; return its name."""
    for name, (known, _) in _objects.items():
        if known is value:
            return name
    is_made = key in (("model",), ("model", "target"), ("dataset",), ("dataset", "target"))
    if is_made and isinstance(value, torch.nn.Module | tuple | list):
        make: Callable[..., Any] = partial(_copied, value)
    elif callable(value):
        make = value if isinstance(value, type) or hasattr(value, "__name__") else partial(value)
    else:
        allowed = "plain data, a function, a torch.nn.Module for model, or two torch data sets for dataset"
        raise UserError(f"{'.'.join(key)}: got an object of type {type(value).__name__}, allowed is {allowed}")
    word = re.sub(r"\W", "_", getattr(value, "__name__", type(value).__name__), flags=re.ASCII)
    name = f"{word}_{sum(each.rpartition('_')[0] == word for each in _objects) + 1}"
    _objects[name] = (value, make)
    return name


def _copied(given: Any) -> Any:
    """Return a copy of a model, so that every run begins with the given weights; return data sets as they are."""
    return copy.deepcopy(given) if isinstance(given, torch.nn.Module) else given
