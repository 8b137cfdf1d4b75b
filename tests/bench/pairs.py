"""Ratios from interleaved pairs: median, range and a verdict that knows noise."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

NUM_PAIRS = 9


@dataclass(frozen=True)
class Ratio:
    """Speed of ours over theirs, pair by pair."""

    what: str  # what is compared, with model and sizes
    values: tuple[float, ...]  # one ratio per pair; above 1 means ours is faster
    target: float  # smallest ratio wanted
    ours_s: float  # median seconds of ours

    @property
    def verdict(self) -> str:
        """Met by the median, missed when the whole range is below, otherwise undecided."""
        if statistics.median(self.values) >= self.target:
            return "met"
        return "missed" if max(self.values) < self.target else "undecided"


def compare(
    what: str, ours: Callable[[], None], theirs: Callable[[], None], target: float, pairs: int = NUM_PAIRS
) -> Ratio:
    """Time two functions in turn, in alternating order, after one warm-up of each."""
    ours()
    theirs()
    values, seconds = [], []
    for pair in range(pairs):
        order = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
        taken = {function: _seconds(function) for function in order}
        values.append(taken[theirs] / taken[ours])
        seconds.append(taken[ours])
    return Ratio(what, tuple(values), target, statistics.median(seconds))


def _seconds(function: Callable[[], None]) -> float:
    gc.collect()
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
