"""Finds where two curves of throughput over bandwidth cross, and bandwidths around it at which runs are measured."""

import math
from collections.abc import Callable, Sequence

STEP = 1.5  # ratio of neighbouring bandwidths
_RUNGS = 6  # bandwidths, three on each side of the crossing, which may be measured one step beside the prediction
LOWEST_BYTES_PER_S, HIGHEST_BYTES_PER_S = 1e6 / 8, 1e11 / 8  # TCP hardly starts below; no kernel copies more
_CLOSE = 1.01


def crossing(ahead: Callable[[float], float]) -> float | None:
    """Return the bandwidth [bytes/s] at which the sign of `ahead` changes, to a hundredth, by bisection.

    `ahead` is the difference of two throughputs at a bandwidth. None if its signs at 1 Mbit/s and 100 Gbit/s are equal.
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
    """Return bandwidths, each `STEP` times the one before; the given one is in the middle, between two of them."""
    return [rounded(bandwidth_bytes_per_s * STEP ** (index - (_RUNGS - 1) / 2)) for index in range(_RUNGS)]


def step_of(ladder: Sequence[float], leads: Sequence[float]) -> tuple[float, float] | None:
    """Return the neighbouring bandwidths between which the sign of `leads` changes; None if it doesn't.

    If it changes more than once, which noise may cause, this returns the change in the middle.
    """
    changes = [i for i in range(len(ladder) - 1) if (leads[i] > 0) != (leads[i + 1] > 0)]
    if not changes:
        return None
    index = changes[len(changes) // 2]
    return ladder[index], ladder[index + 1]


def rounded(bandwidth_bytes_per_s: float) -> float:
    """Return a bandwidth rounded to three significant digits in bits per second, as it is set and printed."""
    bits = 8 * bandwidth_bytes_per_s
    unit = 10.0 ** (math.floor(math.log10(bits)) - 2)
    return round(bits / unit) * unit / 8
