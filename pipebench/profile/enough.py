"""How well a median is known, and when measuring it further is a waste.

The confidence interval of a median by order statistics asks nothing of the distribution, so heavy tails and outliers,
which times on shared machines have, don't spoil it: of n independent samples in order, the l-th and the (n + 1 - l)-th
enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < l).

Sources: Le Boudec, Performance Evaluation of Computer and Communication Systems (2010), theorem 2.1; Hoefler and Belli,
Scientific Benchmarking of Parallel Computing Systems (SC'15), who stop measuring by the interval's relative width.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95


@dataclass(frozen=True)
class StopRule:
    """When repeated measurements are enough.

    Looked at after every repetition, an interval of 95% encloses the median in about nine of ten cases: measuring ends
    when it happens to be narrow.
    """

    within: float = 0.05  # half the intervals' width, as a share of the medians
    least: int = 6  # repetitions, at least
    most: int = 15  # repetitions, at most
    least_s: float = 0.0  # seconds, at least, unless there are `most` repetitions
    most_s: float = 10.0  # seconds after which nothing more is begun, with `few` repetitions at least
    few: int = 3  # repetitions that a median needs at least, until `long_s`

    @property
    def long_s(self) -> float:
        """Seconds after which a single repetition is enough: in one so long, what disturbs short ones averages out."""
        return self.few * self.most_s

    def is_met(self, series: Sequence[Sequence[float]], elapsed_s: float) -> bool:
        """Return whether no more is needed of quantities measured together, a series each, after some seconds."""
        count = min((len(each) for each in series), default=self.most)
        needed = self.few if elapsed_s < self.long_s else 1
        if count >= self.most or (count >= needed and elapsed_s >= self.most_s):
            return True
        return count >= self.least and elapsed_s >= self.least_s and uncertainty(series) <= self.within


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the median's confidence interval; infinite of too few samples, less than 6 for 95%."""
    ordered, rank = sorted(samples), _rank(len(samples))
    return (ordered[rank - 1], ordered[-rank]) if rank else (-math.inf, math.inf)


def uncertainty(series: Sequence[Sequence[float]]) -> float:
    """Return half the width of the medians' intervals over the medians, both added over all series; 0 of none.

    Added, since a step's time is the sum over its layers: one of a thousandth may be known a thousand times worse. The
    intervals are those of 95%.
    """
    ends = [median_interval(each) for each in series]
    width = sum(high - low for low, high in ends)
    total = sum(statistics.median(each) for each in series)
    return width / 2 / total if total > 0 else 0.0


@cache
def _rank(count: int) -> int:
    """Return the largest l whose order statistics enclose the median with enough confidence; 0 if none does."""
    outside, rank = 0.0, 0
    for below in range(count // 2):
        outside += math.comb(count, below) / 2 ** (count - 1)  # on either side
        if 1 - outside < CONFIDENCE:
            break
        rank = below + 1
    return rank
