"""Converts a checked recipe's plain data to typed values, and to texts by full key."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pipebench.errors import shown
from pipebench.recipe.leaves import section_in, types_of


def flattened(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield full keys with their values as YAML on one line."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", shown(value) if value is None or isinstance(value, bool) else str(value)


def typed(expected: Any, value: Any) -> Any:
    """Return checked data as values of a type: sections as dataclasses, and whole numbers as floats where expected."""
    parts = (expected, *get_args(expected))
    if isinstance(value, dict):
        section = section_in(expected)
        if section is None:
            return value
        return section(**{name: typed(types_of(section)[name], each) for name, each in value.items()})
    if isinstance(value, list):
        lists = [get_args(part)[0] for part in parts if get_origin(part) is list]
        return [typed(lists[0], item) for item in value] if lists else value
    return float(value) if float in parts and type(value) is int else value
