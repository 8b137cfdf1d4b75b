"""Checks values of a recipe against declared types, strictly: no quoted numbers, no booleans for numbers, no NaN.

OmegaConf would convert `"3"` to 3 silently.
"""

import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pipebench.errors import choice, shown

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
UNQUOTE = "; remove the quotes"  # hint for a text that is a number
_LARGEST = 2**63 - 1


def in_words(expected: Any) -> str:
    """Describe the values of a type, as in `allowed is a whole number`."""
    if is_dataclass(expected):
        return f"a mapping with the keys {', '.join(field.name for field in fields(expected))}"
    if _is_union(expected):
        return " or ".join(in_words(part) for part in get_args(expected))
    if get_origin(expected) is Literal:
        return f"one of {', '.join(map(str, get_args(expected)))}"
    if get_origin(expected) in (list, tuple):
        return f"a list of {in_words(get_args(expected)[0]).removeprefix('a ').removeprefix('one of ')}"
    return _WORDS.get(expected, "a mapping" if _is_mapping(expected) else "a plain value")


def problem_with(value: object, expected: Any) -> str | None:
    """Return what is wrong with a value of the expected type, as the end of a sentence, or None."""
    if get_origin(expected) is Literal:
        allowed = [str(name) for name in get_args(expected)]
        return None if value in get_args(expected) and isinstance(value, str) else choice(value, allowed)
    inside = get_args(expected)[0] if get_origin(expected) in (list, tuple) else None
    if get_origin(inside) is Literal and isinstance(value, list):
        return next((problem for item in value if (problem := problem_with(item, inside)) is not None), None)
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "got a whole number beyond 2^63, which no setting needs"
    if _fits(value, expected):
        return None
    hint = UNQUOTE if _is_quoted_number(value, expected) else ""
    if _fits("text", expected) and isinstance(value, int | float):
        hint = "; put it in quotes" if math.isfinite(value) else "; numbers are finite"
    return f"got {shown(value)}, allowed is {in_words(expected)}{hint}"


def checkable(expected: Any) -> Any:
    """Return a type if plain values can be checked against it, otherwise Any.

    >>> checkable(list[float]), checkable(list[object])
    (list[float], typing.Any)
    """
    return expected if _is_checkable(expected) else Any


def _is_checkable(expected: Any) -> bool:
    if _is_union(expected):
        return all(map(_is_checkable, get_args(expected)))
    if get_origin(expected) is Literal:
        return all(isinstance(name, str) for name in get_args(expected))
    if get_origin(expected) in (list, tuple):
        inside = [part for part in get_args(expected) if part is not Ellipsis]
        return bool(inside) and len(set(inside)) == 1 and _is_checkable(inside[0])
    return any(expected is each for each in _WORDS)


def _fits(value: object, expected: Any) -> bool:
    if expected is Any:
        return _is_plain(value)
    if _is_union(expected):
        return any(_fits(value, part) for part in get_args(expected))
    if get_origin(expected) is Literal:
        return value in get_args(expected)
    if get_origin(expected) in (list, tuple):
        return isinstance(value, list) and all(_fits(item, get_args(expected)[0]) for item in value)
    if is_dataclass(expected) or _is_mapping(expected):
        return isinstance(value, dict)
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is (type(None) if expected is None else expected)


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _is_union(expected: Any) -> bool:
    return get_origin(expected) in (Union, types.UnionType)


def _is_mapping(expected: Any) -> bool:
    return expected is dict or get_origin(expected) is dict or get_origin(expected) is Mapping


def _is_quoted_number(value: object, expected: Any) -> bool:
    if not isinstance(value, str) or not value.isascii() or not (_fits(1, expected) or _fits(1.5, expected)):
        return False
    if value[:1] == "0" and value[1:2].isdigit():  # `01` is text without quotes, too, as an element of 0,01
        return False
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False
