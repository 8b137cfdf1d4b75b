"""Options of models and data sets: the typed keyword arguments of the function that makes them.

Options of classes and models that need torch are listed in tables, so that recipes are checked without importing it.
"""

import contextlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from pipebench.errors import nearest
from pipebench.recipe.class_options import Option
from pipebench.recipe.typecheck import checkable, in_words, problem_with
from pipebench.zoo.registry import DATASETS, MODELS

RESERVED = ("name", "target", "leaves")
# Keys of `dataset`, with a target that returns a pair of data sets, that are no arguments of the target.
OF_PAIRS = ("loss", "metrics", "inputs", "targets", "loader_processes")


def options(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's `model` or `dataset` without pipebench's own keys."""
    return {name: value for name, value in section.items() if name not in RESERVED}


def target_options(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a data set's target."""
    return {name: value for name, value in options(dataset).items() if name not in OF_PAIRS}


def option_type(section: str, name: object, option: str) -> Any:
    """Return the type of an option of the zoo's model or data set `name`; Any if unknown. `section` is its key."""
    known = isinstance(name, str) and name in (MODELS if section == "model" else DATASETS)
    parameter = zoo_options(section, str(name)).get(option) if known else None
    return Any if parameter is None else parameter.annotation


def zoo_options(section: str, name: str) -> dict[str, inspect.Parameter]:
    """Return the options of one of the zoo's models or data sets by name, without importing torch."""
    if section == "model":
        return listed(MODELS[name].options)
    make = DATASETS[name].make
    return _typed(inspect.signature(make).parameters, typing.get_type_hints(make))


def listed(options: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    """Return listed options with their defaults as parameters; a default that is a tuple means a list of numbers."""
    known = {name: each if isinstance(each, Option) else Option(_type_of(each), each) for name, each in options.items()}
    return {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for name, each in known.items()
    }


def _type_of(default: object) -> Any:
    return list[float] if isinstance(default, tuple) else type(default)


def _typed(parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    return {name: each.replace(annotation=hints.get(name, Any)) for name, each in parameters.items()}


def target_problems(
    make: Callable[..., Any], given: Mapping[str, Any], passed: tuple[str, ...] = (), beside: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Yield option and problem for every argument that a target doesn't take, or whose value has a wrong type.

    Values are checked against annotations of plain types only. Classes written in C have neither annotations nor a
    signature, and take anything.

    Args:
        make: the target, a function or class.
        given: arguments by name.
        passed: names of the arguments that pipebench passes, in order of the parameters; `*` for one of any name.
        beside: keys of the section that are no arguments, for messages.
    """
    parameters = arguments_of(make, passed)
    if parameters is None:
        return
    hints = _hints(make.__init__ if inspect.isclass(make) else make)
    known = {name: checkable(hints.get(name, Any)) for name in parameters}
    known = {
        name: hint | None if hint is not Any and parameters[name].default is None else hint
        for name, hint in known.items()
    }
    yield from problems_of(_typed(parameters, known), given, beside)


def arguments_of(make: Callable[..., Any], passed: tuple[str, ...] = ()) -> dict[str, inspect.Parameter] | None:
    """Return a target's parameters without those that pipebench passes; None if it has no signature."""
    try:
        parameters = dict(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return None
    positional = [name for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.KEYWORD_ONLY)]
    for name, taker in zip(passed, [*positional, *passed], strict=False):
        parameters.pop(taker if name == "*" else name, None)
    return parameters


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a user's function, without those that name types for type checkers alone."""
    hints: dict[str, Any] = {}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    for name, given in getattr(function, "__annotations__", {}).items():
        with contextlib.suppress(Exception):
            hints |= typing.get_type_hints(SimpleNamespace(__annotations__={name: given}), names)
    return hints


def problems_of(
    parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], beside: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Yield option and problem for every unknown option, wrong type, and required parameter that isn't given.

    `beside` are further names that messages list.
    """
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    allowed = {
        name: each.annotation
        for name, each in parameters.items()
        if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
    }
    for name, value in given.items():
        if name not in allowed and not takes_any:
            names = [*allowed, *beside]
            yield name, f"unknown option, allowed are {', '.join(names) or 'none'}{nearest(name[:60], names)}"
        elif (problem := problem_with(value, allowed.get(name, Any))) is not None:
            yield name, problem
    for name, hint in allowed.items():
        if name not in given and parameters[name].default is inspect.Parameter.empty:
            yield name, f"is missing, needed is {in_words(hint)}"
