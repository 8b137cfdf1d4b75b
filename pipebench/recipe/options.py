"""Options of models and data sets: the typed keyword arguments of the function that makes them."""

import contextlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from pipebench.errors import nearest
from pipebench.recipe.signatures import bare
from pipebench.recipe.typecheck import checkable, in_words, problem_with
from pipebench.zoo.registry import DATASETS, MODELS

RESERVED = ("name", "target", "leaves")
# Keys of `dataset`, with a target that returns a pair of data sets, that are no arguments of the target.
OF_PAIRS = ("loss", "mean_over", "metrics", "inputs", "targets", "loader_processes")


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
    make = bare(f"pipebench.zoo{MODELS[name].target}") if section == "model" else DATASETS[name].make
    return _typed(inspect.signature(make).parameters, typing.get_type_hints(make))


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
    parameters = typed_arguments(make, passed)
    if parameters is not None:
        yield from problems_of(parameters, given, beside)


def typed_arguments(make: Callable[..., Any], passed: tuple[str, ...]) -> dict[str, inspect.Parameter] | None:
    """Return `arguments_of` a target with the types by which plain values are checked."""
    parameters = arguments_of(make, passed)
    if parameters is None:
        return None
    hints = _hints(make.__init__ if inspect.isclass(make) else make)
    known = {name: checkable(hints.get(name, Any)) for name in parameters}
    known = {
        name: hint | None if hint is not Any and parameters[name].default is None else hint
        for name, hint in known.items()
    }
    return _typed(parameters, known)


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
