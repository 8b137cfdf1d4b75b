"""The options of a model or data set are the typed keyword arguments of the function that makes it."""

import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipebench.errors import nearest
from pipebench.recipe.typecheck import in_words, problem_with

RESERVED = ("name", "target", "leaves")


def options(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's `model` or `dataset` without the keys that are pipebench's own."""
    return {name: value for name, value in section.items() if name not in RESERVED}


def option_problems(make: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield option and problem for every option that the function doesn't take, or not like this."""
    parameters = inspect.signature(make).parameters
    hints = typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    allowed = [
        name for name, each in parameters.items() if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    for name, value in given.items():
        if name not in allowed and not takes_any:
            yield name, f"unknown option, allowed are {', '.join(allowed) or 'none'}{nearest(name[:60], allowed)}"
        elif (problem := problem_with(value, hints.get(name, Any))) is not None:
            yield name, problem
    for name in allowed:
        if name not in given and parameters[name].default is inspect.Parameter.empty:
            yield name, f"is missing, needed is {in_words(hints.get(name, Any))}"


def import_target(target: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` names; modules in the working directory are found too.

    Raises:
        ImportError: there is no such module, or no such function in it.
    """
    module_name, _, function_name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise ImportError(f"module {module_name} has no function {function_name}")
    return typing.cast("Callable[..., Any]", function)


def make_model(model: Mapping[str, Any]) -> Any:
    """Return the `torch.nn.Module` that a recipe's `model` asks for, from the zoo or from a `target`.

    Raises:
        ImportError: the `target` isn't there.
        TypeError, ValueError: the options don't suit it.
    """
    from zoo import MODELS

    make = import_target(model["target"]) if model.get("target") else MODELS[model["name"]].make
    return make(**options(model))


def make_dataset(dataset: Mapping[str, Any]) -> Any:
    """Return the `zoo.Dataset` that a recipe's `dataset` asks for; its data needn't be there.

    Raises:
        TypeError, ValueError: the options don't suit it.
    """
    from zoo import DATASETS

    return DATASETS[dataset["name"]].make(**options(dataset))
