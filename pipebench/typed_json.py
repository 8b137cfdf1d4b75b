"""Rules for JSON that is read back: what a value may be, and one sentence about the first that is something else.

Whatever lies on a disk may have been changed there. Everything that is read back is checked against rules like these
before anything of it is used. A rule takes a value and where it stands, and raises.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipebench.errors import UserError, nearest

# Beyond these a number is a slip, not a measurement: 31 years, and an exabyte.
MAX_SECONDS = 1e9
MAX_BYTES = 2**60

Rule = Callable[[Any, str], None]


class JsonError(UserError, ValueError):
    """A value that breaks a rule; says where it stands, what was found and what is allowed."""


def record(rules: Mapping[str, Rule]) -> Rule:
    """Return the rule of an object with exactly these keys, each with its own rule."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise wrong(value, where, "an object")
        for key in value:
            if key not in rules:
                raise JsonError(f"{_at(where)}unknown key {shown(key)}{nearest(key, rules)}")
        for key, rule in rules.items():
            if key not in value:
                raise JsonError(f"{_at(where)}{key!r} is missing")
            rule(value[key], f"{where}.{key}" if where else key)

    return check


def text(value: Any, where: str) -> None:
    """Let texts pass that can be encoded."""
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise wrong(value, where, "text")


def flag(value: Any, where: str) -> None:
    """Let true and false pass."""
    if not isinstance(value, bool):
        raise wrong(value, where, "true or false")


def whole(low: int, high: int) -> Rule:
    """Return the rule of whole numbers from `low` to `high`, both included."""

    def check(value: Any, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(value, where, f"a whole number from {low}" + (f" to {high}" if high < MAX_BYTES else " on"))

    return check


count = whole(0, MAX_BYTES)


def seconds(value: Any, where: str) -> None:
    """Let durations pass."""
    if not _is_number(value) or not 0 <= value <= MAX_SECONDS:  # NaN isn't either
        raise wrong(value, where, f"seconds from 0 to {MAX_SECONDS:g}")


def finite(value: Any, where: str) -> None:
    """Let numbers pass that a float can hold, but neither NaN nor infinity."""
    if not _is_number(value) or abs(value) > 1e308 or not math.isfinite(value):
        raise wrong(value, where, "a finite number")


def number(value: Any, where: str) -> None:
    """Let all numbers pass that a float can hold; a metric may be infinite, or none."""
    if not _is_number(value) or (isinstance(value, int) and abs(value) > 1e308):
        raise wrong(value, where, "a number")


def one_of(allowed: Sequence[str]) -> Rule:
    """Return the rule of a few texts."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or value not in allowed:
            raise wrong(value, where, ", ".join(allowed))

    return check


def optional(rule: Rule) -> Rule:
    """Return a rule that lets null pass too."""

    def check(value: Any, where: str) -> None:
        if value is not None:
            rule(value, where)

    return check


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """Return the rule of lists, of a length if one is given, whose items all follow a rule."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise wrong(value, where, "a list")
        if length is not None and len(value) != length:
            raise JsonError(f"{_at(where)}has {len(value)} items, allowed is {length}")
        for index, item in enumerate(value):
            rule(item, f"{where}[{index}]")

    return check


def row_of(*rules: Rule) -> Rule:
    """Return the rule of lists with one item per rule."""

    def check(value: Any, where: str) -> None:
        list_of(lambda item, place: None, len(rules))(value, where)
        for index, rule in enumerate(rules):
            rule(value[index], f"{where}[{index}]")

    return check


def by_name(rule: Rule) -> Rule:
    """Return the rule of objects whose values all follow a rule."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise wrong(value, where, "an object")
        for name, item in value.items():
            text(name, where)
            rule(item, f"{where}[{shown(name)}]")

    return check


def by_samples(rule: Rule) -> Rule:
    """Return the rule of objects whose keys are numbers of samples."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise wrong(value, where, "an object")
        for size, item in value.items():
            plain = size.isascii() and size.isdecimal() and len(size) < 16
            if not plain or str(int(size)) != size or size == "0":
                raise wrong(size, where, "numbers of samples as keys")
            rule(item, f"{where}[{size}]")

    return check


def wrong(value: Any, where: str, allowed: str) -> JsonError:
    """Return the standard sentence about a value."""
    return JsonError(f"{_at(where)}got {shown(value)}, allowed is {allowed}")


def shown(value: Any) -> str:
    """Return a value as it can stand in a sentence: short, on one line; what holds other things only as what it is."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) > MAX_BYTES:  # a number of thousands of digits has no text at all
        return "a huge number"
    plain = ascii(value)
    return plain if len(plain) <= 60 else f"{plain[:57]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at(where: str) -> str:
    return f"{where}: " if where else ""
