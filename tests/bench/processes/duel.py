"""Two sides in the same processes, turn by turn: neither has a warmer cache, a luckier heap or a quieter machine."""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.pairs import NUM_PAIRS, Ratio
from tests.bench.processes.crew import Taken, together


@dataclass(frozen=True)
class Duel:
    """What came of it.

    Attributes:
        what: what is compared.
        speeds: speed of ours over theirs, pair by pair.
        target: smallest ratio wanted; 0 for none.
        ours_s, theirs_s: median seconds.
        work: median of processor time of theirs over ours, all processes and threads together. It says whether a
            difference in speed is more work or more waiting, and other programs disturb it less.
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


def duel(
    what: str, ours: Callable[[], object], theirs: Callable[[], object], target: float, pairs: int = NUM_PAIRS
) -> Duel:
    """Time two functions in turn, in alternating order, after one warm-up of each; all processes call it alike.

    A time is that of the slowest process, from a barrier on. `target` is the smallest ratio wanted; 0 for none.
    """
    ours()
    theirs()
    found: list[tuple[Taken, Taken]] = []
    for pair in range(pairs):
        taken: dict[bool, Taken] = {}
        for is_ours in (True, False) if pair % 2 == 0 else (False, True):
            gc.collect()
            taken[is_ours] = together(ours if is_ours else theirs)
        found.append((taken[True], taken[False]))
    return Duel(
        what,
        tuple(b.slowest_s / a.slowest_s for a, b in found),
        target,
        statistics.median(a.slowest_s for a, _ in found),
        statistics.median(b.slowest_s for _, b in found),
        statistics.median(b.processor_s / a.processor_s for a, b in found),
    )
