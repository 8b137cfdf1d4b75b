"""Fit constants so that computed cells match published ones: least squares of log ratios, by coordinate descent.

There are few constants, and cells are smooth functions of them. Each constant is found by Gauss-Newton steps with
secant slopes. If these don't converge, for example beside a value beyond which the cells are constant, it is found by
golden-section search. The constants take turns until none changes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

# Steps are in the logarithm of a constant.
_SETTLED = 2e-3  # a smaller step, 0.2 % of the constant, ends the search
_STEPS, _ROUNDS = 10, 5  # Gauss-Newton steps per constant, and turns of all constants, at most
_FIRST_STEP = 0.1
_LONGEST_STEP = 1.0
_GOLDEN = (math.sqrt(5) - 1) / 2

Cell = tuple[str, str]  # row and measure
Error = Callable[[Mapping[str, float], Cell], float]  # ln(reproduced / published) of a cell, with these constants


@dataclass(frozen=True)
class Sought:
    """A constant to be fitted."""

    name: str
    low: float  # smallest allowed, above 0
    high: float  # largest allowed
    cells: tuple[Cell, ...]  # on which it is fitted


def fit(sought: Sequence[Sought], error: Error, start: Mapping[str, float]) -> dict[str, float]:
    """Return the constants that minimise the squared errors of their cells.

    Args:
        sought: the constants; one without cells keeps its value.
        error: of a cell, as a function of the constants.
        start: first values by name, of these and of any other constants.
    """
    values = dict(start)
    several = sum(bool(each.cells) for each in sought) > 1
    for _ in range(_ROUNDS if several else 1):
        before = dict(values)
        for each in sought:
            if each.cells:
                values[each.name] = _best(each, error, values)
        if all(abs(math.log(values[name] / before[name])) < _SETTLED for name in values):
            break
    return values


def left_out(sought: Sequence[Sought], error: Error, fitted: Mapping[str, float]) -> dict[Cell, float | None]:
    """Return the leave-one-out error of every fitted cell; None if its constants have no other cell.

    Constants not fitted on the cell keep their fitted value.
    """
    found: dict[Cell, float | None] = {}
    for cell in dict.fromkeys(cell for each in sought for cell in each.cells):
        own = [each for each in sought if cell in each.cells]
        others = [replace(each, cells=tuple(other for other in each.cells if other != cell)) for each in own]
        found[cell] = error(fit(others, error, fitted), cell) if all(each.cells for each in others) else None
    return found


def _best(sought: Sought, error: Error, values: Mapping[str, float]) -> float:
    """Return the best value of one constant, all others fixed."""
    low, high = math.log(sought.low), math.log(sought.high)

    def errors(x: float) -> list[float]:
        return [error({**values, sought.name: math.exp(x)}, cell) for cell in sought.cells]

    x = min(max(math.log(values[sought.name]), low), high)
    step = _FIRST_STEP if x + _FIRST_STEP <= high else -_FIRST_STEP
    now = errors(x)
    for _ in range(_STEPS):
        before, x = (x, now), min(max(x + step, low), high)
        if abs(x - before[0]) < _SETTLED:
            return math.exp(x)
        now = errors(x)
        # Gauss-Newton for one unknown: minimise sum (error + slope * step)^2, with slopes from the last two values.
        slopes = [(a - b) / (x - before[0]) for a, b in zip(now, before[1], strict=True)]
        steepness = math.fsum(slope * slope for slope in slopes)
        if steepness == 0:  # no cell depends on the constant here
            break
        step = -math.fsum(a * slope for a, slope in zip(now, slopes, strict=True)) / steepness
        step = min(max(step, -_LONGEST_STEP), _LONGEST_STEP)
    return math.exp(_by_golden_section(lambda at: math.fsum(each * each for each in errors(at)), low, high))


def _by_golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a unimodal function."""
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > _SETTLED:
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = function(b)
    return (low + high) / 2
