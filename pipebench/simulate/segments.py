"""Segments of a run, each between two drains, wherever in an epoch they begin: those that are alike are simulated once.

An epoch's last minibatch may be short. At the end of a segment it is simulated as it is; in the middle of one, what it
is shorter by is subtracted.
"""

import math

from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import SegmentTotals, Workload, simulate_all, simulate_segment


class Segments:
    """The segments of one workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._totals_of: dict[tuple[int, bool, int | None], SegmentTotals] = {}

    def totals(self, first: int, num_minibatches: int, meter: Meter | None = None) -> SegmentTotals:
        """Return the totals of a segment that begins with minibatch `first` of a run; `meter` records a new one."""
        sampler = self._workload.sampler
        per_epoch = sampler.minibatches_per_epoch
        begin = first % per_epoch
        end = begin + num_minibatches
        inside = (end - 1) // per_epoch if sampler.size(per_epoch - 1) < sampler.size(0) else 0
        key = num_minibatches, end % per_epoch == 0, begin if inside else None
        if key not in self._totals_of:
            self._totals_of[key] = self._simulated(begin, num_minibatches, inside, meter)
        return self._totals_of[key]

    def _simulated(self, begin: int, num_minibatches: int, inside: int, meter: Meter | None) -> SegmentTotals:
        """Simulate a segment with so many short minibatches before its end."""
        workload, per_epoch = self._workload, self._workload.sampler.minibatches_per_epoch
        if inside and per_epoch <= 2 * self._window:
            return simulate_all(workload, num_minibatches, meter, first=begin)
        ends_epoch = (begin + num_minibatches) % per_epoch == 0
        whole = simulate_segment(workload, num_minibatches, meter, ends_epoch=ends_epoch)
        return whole.extended(self._short(), inside) if inside else whole

    def _short(self) -> SegmentTotals:
        """Return what an epoch's last, short minibatch adds in the middle of a segment: less than 0."""
        middle = self._workload.sampler.minibatches_per_epoch - self._window
        with_it, without = (simulate_all(self._workload, 2 * self._window, first=first) for first in (middle, 0))
        return with_it.extended(without, -1)

    @property
    def _window(self) -> int:
        """Minibatches that fill and empty a pipeline, with a margin."""
        pipeline = self._workload.pipeline
        return math.ceil(8 * pipeline.depth / pipeline.period) * pipeline.period
