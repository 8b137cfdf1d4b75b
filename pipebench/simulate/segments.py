"""Segments of a run between two drains, anywhere in an epoch; equal ones are simulated once.

An epoch's last minibatch may be short. At the end of a segment it is simulated. Of short ones in the middle of a
segment, the time that they save is subtracted, of all of them together: what one saves may depend on the others. If
minibatches vary in length, short ones in the middle are simulated as they are drawn.
"""

import math
from dataclasses import replace
from functools import cache, cached_property, partial

from pipebench.model.sampling import Sampler
from pipebench.simulate.meter import Meter
from pipebench.simulate.network import Network
from pipebench.simulate.statistics import average_statistics
from pipebench.simulate.steady import NOTHING, SegmentTotals, Workload, simulate_all, simulate_segment

_MOST_TRIED = 4  # rounds of short minibatches


class Segments:
    """The segments of one workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._totals_of: dict[tuple[int, bool, int | None], SegmentTotals] = {}
        self._short = cache(self._of_short)

    def totals(self, first: int, num_minibatches: int, meter: Meter | None = None) -> SegmentTotals:
        """Return the totals of a segment that begins with minibatch `first` of a run.

        `meter` records the segment, unless an equal one was simulated before.
        """
        sampler = self._workload.sampler
        per_epoch = sampler.minibatches_per_epoch
        begin = first % per_epoch
        end = begin + num_minibatches
        subtracts = sampler.size(per_epoch - 1) < sampler.size(0) and not sampler.varies
        inside = (end - 1) // per_epoch if subtracts else 0
        key = num_minibatches, end % per_epoch == 0, begin if inside else None
        if key not in self._totals_of:
            self._totals_of[key] = self._simulated(begin, num_minibatches, inside, meter)
        return self._totals_of[key]

    @cached_property
    def drain(self) -> SegmentTotals:
        """Totals of a drain after a segment's last update, in which replicas average running statistics."""
        workload, ends_s = self._workload, [0.0]
        network = Network(workload.cluster, workload.devices, copies=bool(workload.pipeline.swaps))
        average_statistics(workload.pipeline, workload.costs, network, 0.0, ends_s.append)
        network.deliver(())
        return replace(NOTHING, end_s=max(ends_s), num_bytes=network.num_bytes)

    def _simulated(self, begin: int, num_minibatches: int, inside: int, meter: Meter | None) -> SegmentTotals:
        """Simulate a segment from minibatch `begin` of an epoch on, with `inside` short minibatches before its end."""
        workload, per_epoch = self._workload, self._workload.sampler.minibatches_per_epoch
        if inside and per_epoch <= 2 * (self._window + workload.pipeline.period):
            return simulate_all(workload, num_minibatches, meter, first=begin)
        ends_epoch = (begin + num_minibatches) % per_epoch == 0
        totals = simulate_segment(workload, num_minibatches, meter, ends_epoch=ends_epoch)
        if not inside:
            return totals
        period, window, steady = workload.pipeline.period, self._window, totals.periods
        if steady is not None:  # the other minibatches, which were simulated, fill and empty the pipeline
            period = steady.num_minibatches
            window = max(window, num_minibatches - steady.times * period)
        elif not totals.error_s:  # nothing repeats; `meter` has the segment without short ones, as elsewhere
            return simulate_all(workload, num_minibatches, first=begin)
        near = partial(_near, window, period)
        before = near(per_epoch - 1 - begin)
        epoch = near(per_epoch) + period  # so `after` doesn't reach the next short one
        after = epoch if ends_epoch else near(begin + num_minibatches - inside * per_epoch)
        saved = partial(self._short, before, epoch, after, ends_epoch)
        # A short one may influence the next. So rounds of short ones, at all places that they take in the period, are
        # simulated until a round saves what the one before has saved; all further rounds save that, too. After a few
        # rounds that differ, all are simulated: every try simulates the ones before again.
        places = period // math.gcd(epoch, period)
        first = 2 * places + (inside - 1) % places + 1
        for simulated in range(first, min(inside, first + _MOST_TRIED * places), places):
            last, before_last = (
                saved(count).extended(saved(count - places), -1) for count in (simulated, simulated - places)
            )
            if math.isclose(last.end_s, before_last.end_s, rel_tol=1e-9, abs_tol=1e-12 * totals.end_s):
                rounds = (inside - simulated) // places
                return totals.extended(saved(simulated), 1).extended(last, rounds)
        return totals.extended(saved(inside), 1)

    def _of_short(self, before: int, epoch: int, after: int, ends_epoch: bool, inside: int) -> SegmentTotals:
        """Return what short minibatches in the middle of a segment add to its totals: less than 0.

        Args:
            before: whole minibatches before the first short one.
            epoch: minibatches from one short one to the next.
            after: minibatches after the last short one inside.
            ends_epoch: whether the last of these is short, too.
            inside: short minibatches.
        """
        length = before + 1 + (inside - 1) * epoch + after
        one_epoch = self._of_epoch(length if ends_epoch else length + 1)
        whole = simulate_all(self._workload, length, first=0, sampler=one_epoch)
        short = simulate_all(self._workload, length, first=epoch - 1 - before, sampler=self._of_epoch(epoch))
        return short.extended(whole, -1)

    def _of_epoch(self, num_minibatches: int) -> Sampler:
        """Return a sampler of epochs of so many minibatches, the last of which is as short as the workload's."""
        sampler = self._workload.sampler
        missing = sampler.minibatch_size - sampler.size(sampler.minibatches_per_epoch - 1)
        return Sampler(num_minibatches * sampler.minibatch_size - missing, sampler.minibatch_size, 0)

    @property
    def _window(self) -> int:
        """Minibatches that fill or empty a pipeline, with a margin."""
        pipeline = self._workload.pipeline
        return math.ceil(8 * pipeline.depth / pipeline.period) * pipeline.period


def _near(window: int, period: int, count: int) -> int:
    """Return the smallest count of neighbouring minibatches with which a short one saves as much as with `count`.

    What it saves depends on how full the pipeline is, on the replica that runs it, on the other minibatches of its
    update, and on its place in a `period` of the steady state. So the count is smaller by whole periods, but no smaller
    than the `window` of minibatches that fill or empty the pipeline.
    """
    return min(count, window + (count - window) % period)
