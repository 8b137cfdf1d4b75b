"""Makes a recipe's model and data set, from the zoo or by `target`."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pipebench.errors import UserCodeError
from pipebench.recipe.options import options
from pipebench.recipe.targets import import_target
from pipebench.recipe.users_code import users_code
from pipebench.zoo.late import torch
from pipebench.zoo.registry import DATASETS, MODELS


def make_model(model: Mapping[str, Any]) -> Any:
    """Return the `torch.nn.Module` of a recipe's `model`.

    Raises:
        UserCodeError: the `target` isn't there, raises, or returns something else.
        TypeError, ValueError: a model of the zoo refuses the options.
    """
    target = model.get("target")
    if target is None:
        return MODELS[model["name"]].make(**options(model))
    make = import_target(target)
    with users_code(f"{target} can't make the model{_with(options(model))}", "model.target"):
        made = make(**options(model))
    if not isinstance(made, torch.nn.Module):
        raise UserCodeError(f"{target} returned {type(made).__name__}, needed is a torch.nn.Module", "model.target")
    for name, module in made.named_modules():
        if problem := _problem(module):
            raise UserCodeError(f"{target}: {name or 'the model'} is a {problem}", "model.target")
    return made


def _problem(module: Any) -> str | None:
    """Return why a module can't be trained here, and what to use instead; None if it can be trained."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return f"{kind} of TorchScript, which takes no weights but its own: use the torch.nn.Module it was made from"
    if any(map(torch.nn.parameter.is_lazy, module.parameters(recurse=False))):
        size = f"give the size, as in {kind.removeprefix('Lazy')}"
        return f"{kind}, whose parameters have no shape before its first input: {size}"
    return None


def make_dataset(dataset: Mapping[str, Any]) -> Any:
    """Return the `pipebench.zoo.Dataset` of a recipe's `dataset`; a data set of the zoo is made without its files.

    Raises:
        UserCodeError: the `target` isn't there, raises, or returns something else.
        TypeError, ValueError: a data set of the zoo refuses the options.
    """
    if dataset.get("target") is not None:
        return _own_dataset(json.dumps(dict(dataset), sort_keys=True))
    return DATASETS[dataset["name"]].make(**options(dataset))


@lru_cache(maxsize=4)
def _own_dataset(text: str) -> Any:
    """Make a data set once per process: reading it may take long, and it depends on its options only."""
    from pipebench.recipe.own_data import own_dataset

    return own_dataset(json.loads(text))


def _with(given: Mapping[str, Any]) -> str:
    return f" with {', '.join(f'{name}={value}' for name, value in given.items())}" if given else ""
