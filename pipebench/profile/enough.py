"""How precisely a median is known, and when to stop measuring.

A median's confidence interval by order statistics assumes nothing about the distribution. So the heavy tails and
outliers of times on shared machines don't spoil it. Of n independent samples in order, the l-th and the (n + 1 - l)-th
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

    The interval is checked after every repetition, so that measuring ends when it happens to be narrow. An interval of
    95% then encloses the median in about nine of ten cases.
    """

    within: float = 0.05  # largest half width of the intervals, as a share of the medians
    least: int = 6  # repetitions, at least
    most: int = 15  # repetitions, at most
    least_s: float = 0.0  # seconds, at least, unless there are `most` repetitions
    most_s: float = 10.0  # seconds after which no repetition is begun, if there are `few`
    few: int = 3  # least repetitions for a median, until `long_s`

    @property
    def long_s(self) -> float:
        """Seconds after which one repetition is enough: in one so long, the disturbances of short ones average out."""
        return self.few * self.most_s

    def is_met(self, series: Sequence[Sequence[float]], elapsed_s: float) -> bool:
        """Return whether quantities that are measured together need no further repetition.

        Args:
            series: the values of every quantity, one per repetition.
            elapsed_s: seconds spent so far.
        """
        count = min((len(each) for each in series), default=self.most)
        needed = self.few if elapsed_s < self.long_s else 1
        if count >= self.most or (count >= needed and elapsed_s >= self.most_s):
            return True
        return count >= self.least and elapsed_s >= self.least_s and uncertainty(series) <= self.within


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the median's confidence interval; infinite for fewer than 6 samples."""
    ordered, rank = sorted(samples), _rank(len(samples))
    return (ordered[rank - 1], ordered[-rank]) if rank else (-math.inf, math.inf)


def uncertainty(series: Sequence[Sequence[float]]) -> float:
    """Return half the width of the medians' 95% intervals over the medians, both summed over all series; 0 for none.

    They are summed because a step's time is the sum over its layers: a layer that takes a thousandth of it may be known
    a thousand times less precisely.
    """
    ends = [median_interval(each) for each in series]
    width = sum(high - low for low, high in ends)
    total = sum(statistics.median(each) for each in series)
    return width / 2 / total if total > 0 else 0.0


@cache
def _rank(count: int) -> int:
    """Return the largest l whose order statistics enclose the median of `count` samples with CONFIDENCE, or else 0."""
    outside, rank = 0.0, 0  # `outside`: the probability that the median is below the l-th or above the (n + 1 - l)-th
    for below in range(count // 2):
        outside += math.comb(count, below) / 2 ** (count - 1)  # both tails
        if 1 - outside < CONFIDENCE:
            break
        rank = below + 1
    return rank
