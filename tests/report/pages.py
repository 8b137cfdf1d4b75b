"""Compares two pages of one report: words must be equal, numbers nearly equal."""

import re
from collections.abc import Iterator

_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
TOLERANCE = 0.005
MADE = "Made 20"


def lines_of(page: str) -> list[str]:
    """Return a page's lines without the last, which says when and by which code it was made."""
    return [line for line in page.splitlines() if not line.startswith(MADE)]


def differences(one: str, other: str) -> list[str]:
    """Return the lines of two texts that differ in words, or in a number by more than half a per cent.

    A number that is written with few digits may differ by one in the last.
    """
    lines = lines_of(one), lines_of(other)
    if len(lines[0]) != len(lines[1]):
        return [f"{len(lines[0])} lines, then {len(lines[1])}"]
    return [f"{a}\n{b}" for a, b in zip(*lines, strict=True) if not _same(a, b)]


def _same(one: str, other: str) -> bool:
    if _NUMBER.sub("0", one) != _NUMBER.sub("0", other):
        return False
    pairs = zip(_numbers(one), _numbers(other), strict=True)
    return all(abs(a - b) <= max(TOLERANCE * max(a, b), 1.01 * last) for (a, last), (b, _) in pairs)


def _numbers(text: str) -> Iterator[tuple[float, float]]:
    """Yield numbers, and what one in the last digit is of those that have a point; whole ones count something."""
    for found in _NUMBER.findall(text):
        _, _, fraction = found.partition(".")
        yield float(found.replace(",", "")), 10.0 ** -len(fraction) if fraction else 0.0
