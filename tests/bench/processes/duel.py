"""Two sides in the same processes, turn by turn: neither has a warmer cache, a luckier heap or a quieter machine."""

import gc
import statistics
from collections.abc import Callable

from tests.bench.pairs import NUM_PAIRS, Ratio
from tests.bench.processes.crew import together


def duel(
    what: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    target: float,
    pairs: int = NUM_PAIRS,
) -> tuple[Ratio, float]:
    """Time two functions in turn, in alternating order, after one warm-up of each; all processes call it alike.

    A time is that of the slowest process, from a barrier on.

    Args:
        what: what is compared.
        ours: does our work once.
        theirs: does the same work the other way.
        target: smallest ratio wanted; 0 for none.
        pairs: at least one.

    Returns:
        The ratio, and the median seconds of theirs.
    """
    ours()
    theirs()
    values, ours_s, theirs_s = [], [], []
    for pair in range(pairs):
        taken: dict[bool, float] = {}
        for is_ours in (True, False) if pair % 2 == 0 else (False, True):
            gc.collect()
            taken[is_ours] = together(ours if is_ours else theirs)
        values.append(taken[False] / taken[True])
        ours_s.append(taken[True])
        theirs_s.append(taken[False])
    return Ratio(what, tuple(values), target, statistics.median(ours_s)), statistics.median(theirs_s)
