"""Where two curves of throughput over bandwidth cross, and the ladder of bandwidths that is climbed to see it."""

import math
from collections.abc import Callable, Sequence

STEP = 1.5
_RUNGS = 6  # three on each side of the crossing: it is looked for within one step, and may lie one beside
LOWEST_BYTES_PER_S, HIGHEST_BYTES_PER_S = 1e6 / 8, 1e11 / 8
_CLOSE = 1.01


def crossing(ahead: Callable[[float], float]) -> float | None:
    """Return the bandwidth [bytes/s] at which a lead changes hands, to a hundredth.

    `ahead` says how far one is ahead of the other, from below 0 to above 0 or the other way. None if nothing changes
    between 1 Mbit/s and 100 Gbit/s.
    """
    low, high = LOWEST_BYTES_PER_S, HIGHEST_BYTES_PER_S
    at_low = ahead(low)
    if (at_low > 0) == (ahead(high) > 0):
        return None
    while high / low > _CLOSE:
        middle = math.sqrt(low * high)
        if (ahead(middle) > 0) == (at_low > 0):
            low = middle
        else:
            high = middle
    return rounded(math.sqrt(low * high))


def rungs(bandwidth_bytes_per_s: float) -> list[float]:
    """Return a ladder of bandwidths, each 1.5 times the one before; the given one is in the middle of a step."""
    return [rounded(bandwidth_bytes_per_s * STEP ** (index - (_RUNGS - 1) / 2)) for index in range(_RUNGS)]


def step_of(ladder: Sequence[float], leads: Sequence[float]) -> tuple[float, float] | None:
    """Return the step of a ladder of bandwidths within which a lead changed hands, or None: it didn't.

    Where the sign changes more than once, as it may by noise, the step in the middle counts.
    """
    changes = [i for i in range(len(ladder) - 1) if (leads[i] > 0) != (leads[i + 1] > 0)]
    if not changes:
        return None
    index = changes[len(changes) // 2]
    return ladder[index], ladder[index + 1]


def rounded(bandwidth_bytes_per_s: float) -> float:
    """Return a bandwidth with three digits of bits per second, which is what is set and printed."""
    bits = 8 * bandwidth_bytes_per_s
    unit = 10.0 ** (math.floor(math.log10(bits)) - 2)
    return round(bits / unit) * unit / 8
