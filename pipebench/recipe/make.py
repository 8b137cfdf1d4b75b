"""Makes a recipe's model and data set: those of the zoo, or what a `target` names."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pipebench.errors import UserCodeError
from pipebench.recipe.options import options
from pipebench.recipe.targets import import_target
from pipebench.recipe.users_code import users_code
from zoo.registry import DATASETS, MODELS


def make_model(model: Mapping[str, Any]) -> Any:
    """Return the `torch.nn.Module` that a recipe's `model` asks for, from the zoo or from a `target`.

    Raises:
        UserCodeError: the `target` isn't there, raises, or returns something else.
        TypeError, ValueError: the options don't suit a model of the zoo.
    """
    target = model.get("target")
    if target is None:
        return MODELS[model["name"]].make(**options(model))
    from torch import nn

    make = import_target(target)
    with users_code(f"{target} can't make the model{_with(options(model))}", "model.target"):
        made = make(**options(model))
    if not isinstance(made, nn.Module):
        raise UserCodeError(f"{target} returned {type(made).__name__}, needed is a torch.nn.Module", "model.target")
    return made


def make_dataset(dataset: Mapping[str, Any]) -> Any:
    """Return the `zoo.Dataset` that a recipe's `dataset` asks for; a zoo's data needn't be there.

    Raises:
        UserCodeError: a `target` isn't there, raises, or returns something else.
        TypeError, ValueError: the options don't suit a data set of the zoo.
    """
    if dataset.get("target") is not None:
        return _own_dataset(json.dumps(dict(dataset), sort_keys=True))
    return DATASETS[dataset["name"]].make(**options(dataset))


@lru_cache(maxsize=4)
def _own_dataset(text: str) -> Any:
    """Make a data set once per process: reading it may take long, and it is a function of its options."""
    from pipebench.recipe.own_data import own_dataset

    return own_dataset(json.loads(text))


def _with(given: Mapping[str, Any]) -> str:
    return f" with {', '.join(f'{name}={value}' for name, value in given.items())}" if given else ""
