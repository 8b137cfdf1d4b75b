"""Ratios of speeds from interleaved measurements: median, range and a verdict that allows for noise."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

NUM_PAIRS = 9
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ratio:
    """Speed of ours over theirs, pair by pair."""

    what: str  # the two sides, with model and sizes
    values: tuple[float, ...]  # one ratio per pair; above 1 means ours is faster
    target: float  # smallest ratio wanted
    ours_s: float  # median seconds of ours

    @property
    def verdict(self) -> str:
        """Met by the median, missed when the whole range is below, otherwise undecided."""
        if statistics.median(self.values) >= self.target:
            return "met"
        return "missed" if max(self.values) < self.target else "undecided"


def alternated(
    ours: Callable[[], object], theirs: Callable[[], object], pairs: int, measure: Callable[[Callable[[], object]], _T]
) -> list[tuple[_T, _T]]:
    """Measure two functions in turn, in alternating order, after one warm-up of each; return ours and theirs per pair.

    A side that always came first, or second, could have the warmer cache.
    """
    ours()
    theirs()
    found: list[tuple[_T, _T]] = []
    for pair in range(pairs):
        taken: dict[bool, _T] = {}
        for is_ours in (True, False) if pair % 2 == 0 else (False, True):
            gc.collect()
            taken[is_ours] = measure(ours if is_ours else theirs)
        found.append((taken[True], taken[False]))
    return found


def compare(
    what: str, ours: Callable[[], object], theirs: Callable[[], object], target: float, pairs: int = NUM_PAIRS
) -> Ratio:
    """Compare the wall times of two functions of this process; see `alternated`."""
    found = alternated(ours, theirs, pairs, seconds)
    ratios = tuple(theirs_s / ours_s for ours_s, theirs_s in found)
    return Ratio(what, ratios, target, statistics.median(ours_s for ours_s, _ in found))


def seconds(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a call takes by a clock."""
    started = clock()
    function()
    return clock() - started


def rounds(
    functions: Mapping[str, Callable[[], object]], num_rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time several functions once per round, after a round of warm-up: a machine that slows down does so for all.

    Returns:
        Seconds per round, by name.
    """
    every = [{name: seconds(function, clock) for name, function in functions.items()} for _ in range(num_rounds + 1)]
    return {name: [each[name] for each in every[1:]] for name in functions}


def median_and_range(values: Sequence[float], form: str) -> tuple[str, str]:
    """Return the median of values, and smallest and largest, each formatted by `form`, such as `.2f`."""
    return f"{statistics.median(values):{form}}", f"{min(values):{form}} to {max(values):{form}}"
