"""Quantities with units in recipes: `10 Gbit/s`, `16 GB`, `5 us`.

A number without a unit is in the base unit. It is refused if another unit was likely meant, as by `10` for a bandwidth.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from pipebench.errors import UserError, shown

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PREFIXES = _DECIMAL | _BINARY

BYTES: Mapping[str, float] = {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()}
BYTES_PER_S: Mapping[str, float] = {f"{prefix}B/s": factor for prefix, factor in _PREFIXES.items()} | {
    f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()
}
SECONDS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

# Other spellings of units, for hints: prefix, bytes or bits, `per second`; and prefix, `seconds`.
_OF_DATA = re.compile(r"((?:[kmgt]i?)?)(bytes?|bits?|b)(/s|/sec|ps)?", re.IGNORECASE | re.ASCII)
_OF_TIME = re.compile("([mun\N{MICRO SIGN}\N{GREEK SMALL LETTER MU}]?)s(ecs?|econds?)?", re.IGNORECASE)
_QUANTITY = re.compile(r"\s*(?P<number>[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?)\s*(?P<unit>\S*)\s*", re.ASCII)


class _Quantity(NamedTuple):
    """A kind of quantity, and what is allowed."""

    what: str  # in messages
    units: Mapping[str, float]  # to a factor of the base unit
    base: str  # the base unit
    smallest: float  # in the base unit
    plain: tuple[float, float]  # a number without a unit is taken for one in the base unit if it is in this range
    example: str


_SIZE = _Quantity("size", BYTES, "B", 1.0, (1e3, math.inf), "16 GB")
_BANDWIDTH = _Quantity("bandwidth", BYTES_PER_S, "B/s", 1.0, (1e3, math.inf), "10 Gbit/s")
_DURATION = _Quantity("duration", SECONDS, "s", 0.0, (0.0, 0.1), "5 us")


class UnitError(UserError, ValueError):
    """A quantity that can't be read; the message has what was given and the allowed units."""


def parse_bytes(given: object) -> int:
    """Return a positive number of bytes, e.g. 16_000_000_000 for `16 GB`.

    Raises:
        UnitError: no number with a unit of `BYTES`, or a number without a unit that was likely meant in another one.
    """
    return round(_parse(given, _SIZE))


def parse_bandwidth(given: object) -> float:
    """Return a positive bandwidth [bytes/s], e.g. 1.25e9 for `10 Gbit/s`.

    Raises:
        UnitError: no number with a unit of `BYTES_PER_S`, or one without a unit that was likely meant in another one.
    """
    return _parse(given, _BANDWIDTH)


def parse_duration(given: object) -> float:
    """Return a duration of 0 or more [s], e.g. 5e-6 for `5 us`.

    Raises:
        UnitError: no number with a unit of `SECONDS`, or one without a unit that was likely meant in another one.
    """
    return _parse(given, _DURATION)


def quantity(text: str) -> float | None:
    """Return a number with or without a unit, of any kind, in its base unit; None for other texts.

    >>> quantity("4"), quantity("1 kB"), quantity("2-1-1")
    (4.0, 1000.0, None)
    """
    match, units = _QUANTITY.fullmatch(text[:100]), {"": 1.0, **BYTES, **BYTES_PER_S, **SECONDS}
    return float(match["number"]) * units[match["unit"]] if match and match["unit"] in units else None


def _parse(given: object, kind: _Quantity) -> float:
    match = None if isinstance(given, bool) else _QUANTITY.fullmatch(str(given)[:100])
    unit = (match["unit"] or kind.base) if match else ""
    got = f"got {shown(given)}"
    if match is None or unit not in kind.units:
        meant = _meant(unit, kind.units)
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise UnitError(
            f"{got}, allowed is a {kind.what}: a number, then one of {', '.join(kind.units)} "
            f"(without a unit: {kind.base}){hint}"
        )
    number, factor = float(match["number"]), kind.units[unit]
    # 1e6 is exact as a float, 1e-6 isn't: dividing by 1e6 gives the float nearest to the text.
    quantity = number * factor if factor >= 1 else number / round(1 / factor)
    if not math.isfinite(quantity) or quantity < kind.smallest:
        raise UnitError(f"{got}, allowed is a {kind.what} of at least {kind.smallest:g} {kind.base}")
    if not match["unit"] and not kind.plain[0] <= quantity < kind.plain[1]:
        raise UnitError(f"{got}, which is {quantity:g} {kind.base}: write its unit, such as {kind.example}")
    return quantity


def _meant(unit: str, units: Mapping[str, float]) -> str:
    """Return the unit that another spelling stands for; "" if that is unclear or not one of `units`.

    >>> _meant("Gbps", BYTES_PER_S), _meant("gb", BYTES), _meant("Gb", BYTES), _meant("usec", SECONDS)
    ('Gbit/s', 'GB', '', 'us')
    """
    if (time := _OF_TIME.fullmatch(unit)) is not None:
        meant = f"{time[1] if time[1].isascii() else 'u'}s".lower()
    elif (data := _OF_DATA.fullmatch(unit)) is not None:
        prefix = next(each for each in _PREFIXES if each.lower() == data[1].lower())
        meant = f"{prefix}{_word(data, of_rates='B/s' in units)}"
    else:
        return ""
    return meant if meant in units else ""


def _word(data: re.Match[str], *, of_rates: bool) -> str:
    """Return `B`, `bit`, `B/s` or `bit/s`; "?" for `gb/s`, which may be either."""
    word, all_small = data[2], data[0].islower()
    if word == "b" and all_small and data[3] != "ps":
        word = "?" if of_rates else "B"
    bits = word == "b" or word.lower().startswith("bit")
    return ("bit" if bits else word[0].upper()) + ("/s" if of_rates else "")
