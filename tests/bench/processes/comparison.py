"""Compares two sides in the same processes, in turn, so that caches, heap and load of the machine are the same."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.pairs import NUM_PAIRS, Ratio, alternated
from tests.bench.processes.workers import together


@dataclass(frozen=True)
class Comparison:
    """The times of two sides.

    Attributes:
        what: the two sides.
        speeds: speed of ours over theirs, pair by pair.
        target: smallest ratio wanted; 0 for none.
        ours_s: median seconds of ours.
        theirs_s: median seconds of theirs.
        work: median of theirs over ours of the CPU time of all threads of all processes. It shows whether a difference
            in speed is work or waiting, and other programs disturb it less.
    """

    what: str
    speeds: tuple[float, ...]
    target: float
    ours_s: float
    theirs_s: float
    work: float

    @property
    def ratio(self) -> Ratio:
        return Ratio(self.what, self.speeds, self.target, self.ours_s)


def compare(
    what: str, ours: Callable[[], object], theirs: Callable[[], object], target: float, pairs: int = NUM_PAIRS
) -> Comparison:
    """Compare two functions, which all processes call together; a time is that of the slowest process, from a barrier.

    `target` is the smallest ratio wanted, 0 for none.
    """
    found = alternated(ours, theirs, pairs, together)
    return Comparison(
        what,
        tuple(b.slowest_s / a.slowest_s for a, b in found),
        target,
        statistics.median(a.slowest_s for a, _ in found),
        statistics.median(b.slowest_s for _, b in found),
        statistics.median(b.processor_s / a.processor_s for a, b in found),
    )
