"""Mean duration of minibatches of varying length, and its standard error, estimated from those simulated.

The duration of a block of minibatches is regressed on the seconds of computing drawn for it, whose mean is known: the
regression estimator of Cochran, Sampling Techniques, chapter 7. It corrects for draws that happen to be long. It uses
the means of 32 batches of blocks, so that the dependence between neighbouring minibatches stays within a batch.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipebench.model.sampling import Size, Varying
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.syncs import SYNCS
from pipebench.simulate.costs import Costs

_BATCHES = 32
_ERROR = 0.006  # relative standard error of a segment's duration at which simulation stops


@dataclass(frozen=True)
class MeanKnown:
    """The mean duration of blocks of minibatches."""

    period: int  # minibatches per block
    mean_s: float  # per block
    error_s: float  # standard error of `mean_s`
    left_out: int  # blocks that need not be simulated


class Average:
    """Estimates the mean duration of the remaining blocks of a segment while it is simulated."""

    def __init__(self, pipeline: Pipeline, costs: Costs, sampler: Varying, num_minibatches: int) -> None:
        self._period = pipeline.period  # minibatches of a block
        self._units = pipeline.period * pipeline.microbatches  # of a block
        self._num_minibatches = num_minibatches
        self._in_flight = math.ceil(max(pipeline.warmups) * pipeline.replicas[0] / self._period) * self._period
        self._works = [_Work(pipeline, costs, sampler, rounds) for rounds in {1, pipeline.num_positions}]
        self._fill = self._in_flight // self._period  # blocks before the first that is timed
        self._num_ended = 0  # units
        self._last_s = 0.0
        self._ends_s: list[float] = []  # of blocks
        self._next = _BATCHES  # timed blocks at the next estimate

    def known(self, end_s: float) -> MeanKnown | None:
        """Record the end of a unit's backward at the input stage; return the mean once it is known."""
        self._num_ended += 1
        self._last_s = max(self._last_s, end_s)
        if self._num_ended % self._units:
            return None
        self._ends_s.append(self._last_s)
        num_timed = len(self._ends_s) - 1 - self._fill
        if num_timed < self._next:
            return None
        self._next += max(1, self._next // 4)
        ends_s = self._ends_s[self._fill :]
        done = len(self._ends_s) * self._period
        # The segment is shortened by so many blocks that no worker has started what is left out, or is near the end.
        left_out = (self._num_minibatches - done - 2 * self._in_flight - self._period) // self._period
        if left_out < 1:
            return None
        took_s = [b - a for a, b in itertools.pairwise(ends_s)]
        first = (self._fill + 1) * self._period
        blocks = [range(first + i * self._period, first + (i + 1) * self._period) for i in range(num_timed)]
        drawn = [_batches([work.of(block) for block in blocks]) for work in self._works]
        mean_s, error_s = regressed(_batches(took_s), drawn, [work.mean(self._period) for work in self._works])
        if error_s * left_out > _ERROR * (self._last_s + mean_s * left_out):
            return None
        return MeanKnown(self._period, mean_s, error_s, left_out)


class _Work:
    """Seconds of computing drawn per round: the maximum over minibatches that wait for each other.

    Replicas wait for each other at every update. Neighbouring stages, which run the minibatches before and after, wait
    for each other to some degree. So the maximum is over the minibatches of `num_rounds` rounds of the input stage.
    """

    def __init__(self, pipeline: Pipeline, costs: Costs, sampler: Varying, num_rounds: int) -> None:
        self._sampler = sampler
        self._round = pipeline.replicas[0] if SYNCS[pipeline.sync].waits else 1
        self._together = self._round * num_rounds
        self._seconds = {
            columns: _seconds(costs, sampler.of_length(columns).sizes(0, pipeline.microbatches))
            for columns, _ in sampler.lengths
        }

    def of(self, minibatches: range) -> float:
        """Return the work of a range of minibatches that consists of whole rounds."""
        around = range(minibatches.start, minibatches.stop + self._together - self._round)
        drawn = [self._seconds[self._sampler.columns(k)] for k in around]
        return sum(max(drawn[i : i + self._together]) for i in range(0, len(minibatches), self._round))

    def mean(self, num_minibatches: int) -> float:
        """Return the expected work of so many minibatches."""
        most_s, below = 0.0, 0.0
        for seconds, share in sorted((self._seconds[columns], share) for columns, share in self._sampler.lengths):
            most_s += seconds * ((below + share) ** self._together - below**self._together)
            below += share
        return most_s * num_minibatches / self._round


def _seconds(costs: Costs, sizes: Sequence[Size]) -> float:
    return sum(stage.forward_s[size] + stage.backward_s[size] for stage in costs.stages for size in sizes)


def _batches(values: Sequence[float]) -> list[float]:
    """Return the means of `_BATCHES` equally large batches of neighbouring values, leaving out the first remainder."""
    each = len(values) // _BATCHES
    values = values[len(values) - each * _BATCHES :]
    return [statistics.fmean(values[i : i + each]) for i in range(0, len(values), each)]


def regressed(values: Sequence[float], known: Sequence[Sequence[float]], means: Sequence[float]) -> tuple[float, float]:
    """Return the mean of `values` by regression on related variables, and its standard error.

    Args:
        values: at least three more than there are variables.
        known: per variable, its value beside each of `values`.
        means: the variables' true means.
    """
    others = (np.array(each) - mean for each, mean in zip(known, means, strict=True))
    design = np.column_stack([np.ones(len(values)), *others])
    inverse = np.linalg.pinv(design.T @ design)  # variables may be equal or constant
    found = inverse @ design.T @ np.array(values)
    left = np.array(values) - design @ found
    variance = float(left @ left) / (len(values) - np.linalg.matrix_rank(design))
    return float(found[0]), math.sqrt(variance * float(inverse[0, 0]))
