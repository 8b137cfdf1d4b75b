"""Values from environment variables, which are recorded and printed as their expressions: they may be secrets."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipebench.errors import hide
from pipebench.recipe.leaves import Key, Leaf, is_expression

_VARIABLE = re.compile(r"oc\.env:\s*([^\s,}]+)")


def of_environment(found: Mapping[Key, Leaf]) -> set[Key]:
    """Return the keys whose values may come from the environment, directly or through other keys.

    An expression that has any part of such a key in it counts, so there may be too many, but none is missed.
    """
    expressions = {key: str(leaf.value) for key, leaf in found.items() if is_expression(leaf.value)}
    keys = {key for key, text in expressions.items() if "oc.env" in text}
    parts: set[str] = set()
    while parts != (parts := {part for key in keys for part in key}):
        keys |= {key for key, text in expressions.items() if parts & set(re.findall(r"\w+", text))}
    return keys


def hide_variables(text: str) -> None:
    """Hide the values of environment variables named in an expression from messages."""
    for name in _VARIABLE.findall(text):
        hide(os.environ.get(name), f"${{oc.env:{name}}}")


def hide_value(value: Any, expression: Any) -> None:
    """Hide an expression's value from messages: the whole, and each part of a list or mapping."""
    for each, written in _parts(value, expression):
        hide(each, written)


def _parts(value: Any, expression: Any) -> Iterator[tuple[object, str]]:
    """Yield every plain value, with the expression that it comes from."""
    if isinstance(value, list | dict):
        alike = type(value) is type(expression) and len(value) == len(expression)
        for place in range(len(value)) if isinstance(value, list) else value:
            yield from _parts(value[place], expression[place] if alike else expression)
    elif is_expression(expression):
        yield value, str(expression)
