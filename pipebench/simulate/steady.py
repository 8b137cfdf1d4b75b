"""Simulated segments: durations and bytes without training, with the steady state found and extrapolated.

A schedule repeats after a block of minibatches. Once the times of every worker also repeat, shifted by a constant,
every further period takes that constant, so only fill, a few periods and drain are simulated. If minibatches vary in
length nothing repeats; then as many are simulated as are needed to estimate the mean of the others.
"""

import itertools
import math
import operator
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pipebench.cluster import Cluster
from pipebench.garbage import without_collector
from pipebench.model.sampling import Sampler, Size, Varying
from pipebench.schedule.instructions import ENDS, FIRST_PARTS, Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import programs
from pipebench.simulate.averaging import Average
from pipebench.simulate.costs import Costs
from pipebench.simulate.crowded import simulation_of
from pipebench.simulate.meter import COMPUTED, Meter, recomputed_s, recomputing
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import TimelineEvent

_BLOCKS = (1, 2, 3, 4, 5, 6, 8, 10, 12)  # numbers of blocks tried as the period
_REPEATS = 3  # periods that must agree before the state counts as steady
_PATIENCE = 2048  # minibatches after which the mean of the later half is used instead, if it has enough blocks
_BATCHES = 8  # parts of that half, for the standard error
_TOLERANCE = 1e-9  # relative; times are sums of floats
_SECONDS = ("busy_s", "stall_s", "again_s", "swap_stall_s")  # fields of `SegmentTotals` that are sums over workers
_Spent = tuple[float, float, float, float]  # a worker's part of each


class Workload(Protocol):
    """What is simulated: an engine's `Setup`, or a plan without a model."""

    @property
    def pipeline(self) -> Pipeline:
        """Shape and order of work."""

    @property
    def costs(self) -> Costs:
        """Seconds and bytes of every instruction."""

    @property
    def cluster(self) -> Cluster:
        """Where it runs."""

    @property
    def devices(self) -> Sequence[int]:
        """The device of every worker."""

    @property
    def sampler(self) -> Sampler:
        """Numbers of samples of every minibatch."""


@dataclass(frozen=True)
class SegmentTotals:
    """Totals of a segment between two drains, over all workers."""

    end_s: float  # duration
    busy_s: float  # of forwards, backwards and updates
    stall_s: float  # waiting for bytes in transit
    num_bytes: Counter[tuple[str, str]]  # payload by (kind, level)
    error_s: float = 0.0  # standard error of the duration if it is estimated
    num_simulated: int = 0  # minibatches that the estimate is based on; 0 if exact
    again_s: float = 0.0  # part of `busy_s` that recomputes forwards
    swap_stall_s: float = 0.0  # backwards waiting for copies from the host
    # Periods of the steady state that were added to the simulated part; a longer segment has more of them
    periods: "AddedPeriods | None" = field(default=None, compare=False, repr=False)

    def longer(self, num_minibatches: int) -> "SegmentTotals | None":
        """Return the totals of a segment longer by `num_minibatches`; None if it has to be simulated."""
        known = self.periods
        if known is None or num_minibatches % known.num_minibatches:
            return None
        times = known.times + num_minibatches // known.num_minibatches
        return replace(known.simulated.extended(known.each, times), periods=replace(known, times=times))

    def extended(self, period: "SegmentTotals", times: int) -> "SegmentTotals":
        """Return the totals with those of `times` periods added; the standard error stays."""
        num_bytes = Counter(self.num_bytes)
        for key, value in period.num_bytes.items():
            num_bytes[key] += value * times
        seconds = {name: getattr(self, name) + getattr(period, name) * times for name in ("end_s", *_SECONDS)}
        return replace(self, num_bytes=num_bytes, periods=None, **seconds)


@dataclass(frozen=True)
class AddedPeriods:
    """Periods of a steady state, added to the totals of a simulated segment."""

    simulated: SegmentTotals
    each: SegmentTotals  # of one period
    num_minibatches: int  # of one period
    times: int


NOTHING = SegmentTotals(0.0, 0.0, 0.0, Counter())


@without_collector()
def simulate_segment(
    workload: Workload,
    num_minibatches: int,
    meter: Meter | None = None,
    *,
    ends_epoch: bool = True,
    until_s: float = math.inf,
) -> SegmentTotals:
    """Return the totals of a segment of whole minibatches, except for an epoch's last if the segment ends with it.

    Args:
        workload: what is simulated.
        num_minibatches: of the segment.
        meter: records the timeline of the simulated part.
        ends_epoch: whether the last minibatch is the epoch's last, which may be short.
        until_s: simulated seconds after which a segment is given up, as one of infinite duration; ignored if
            minibatches vary in length.
    """
    run = _Run(workload, num_minibatches, meter, ends_epoch=ends_epoch)
    if workload.sampler.varies:
        return _estimated(workload, run, num_minibatches)
    detector, found = _SteadyStateDetector(workload.pipeline), None
    for event in run:
        if found is None and event.instruction.op in ENDS:
            if event.start_s > until_s:
                return replace(run.totals(), end_s=math.inf)
            found = detector.steady(event, run.spent(event.worker), num_minibatches)
            if found is not None:  # programs of a segment shorter by whole periods begin with the same instructions
                run.shorten(num_minibatches - found.left_out * found.period)
    totals = run.totals()
    if found is None:
        return totals
    # A period of its own has the exact bytes; between two times of a longer run they vary from period to period.
    num_bytes = _simulated(_Run(workload, found.period, ends_epoch=False)).num_bytes
    each = replace(found.each, num_bytes=num_bytes)
    extended = totals.extended(each, found.left_out)
    if not found.error_s:
        return replace(extended, periods=AddedPeriods(totals, each, found.period, found.left_out))
    simulated = num_minibatches - found.left_out * found.period
    return replace(extended, error_s=found.error_s * found.left_out, num_simulated=simulated)


def _estimated(workload: Workload, run: "_Run", num_minibatches: int) -> SegmentTotals:
    """Return the totals of a segment of varying lengths, simulated until the mean of the rest can be estimated."""
    sampler = workload.sampler
    assert isinstance(sampler, Varying)
    average, found = Average(workload.pipeline, workload.costs, sampler, num_minibatches), None
    for event in run:
        if found is None and event.instruction.op in ENDS and event.instruction.stage == 0:
            found = average.known(event.end_s)
            if found is not None:
                run.shorten(num_minibatches - found.left_out * found.period)
    totals = run.totals()
    if found is None:
        return totals
    left_out = found.left_out
    # Bytes and computing don't depend on time, so a period of each length has the exact ones.
    alike = []
    for columns, share in sampler.lengths:
        period = _Run(workload, found.period, ends_epoch=False, sampler=sampler.of_length(columns))
        alike.append((share * left_out, _simulated(period)))
    num_bytes = Counter(totals.num_bytes)
    for key in {key for _, each in alike for key in each.num_bytes}:
        num_bytes[key] += round(sum(times * each.num_bytes[key] for times, each in alike))
    simulated = num_minibatches - left_out * found.period
    return SegmentTotals(
        totals.end_s + found.mean_s * left_out,
        totals.busy_s + sum(times * each.busy_s for times, each in alike),
        totals.stall_s * num_minibatches / simulated,
        num_bytes,
        found.error_s * left_out,
        simulated,
        totals.again_s + sum(times * each.again_s for times, each in alike),
        totals.swap_stall_s * num_minibatches / simulated,
    )


@without_collector()
def estimate_rate(workload: Workload, num_minibatches: int, num_instructions: int) -> tuple[float, int]:
    """Estimate the seconds per minibatch in steady state; also return the number of instructions simulated.

    Without a steady state, the estimate is the rate of the slowest worker in the later half of what was simulated, or
    infinity if that is too short. `num_minibatches` must have at least `num_instructions`, up to one epoch.
    """
    pipeline, taken = workload.pipeline, 0
    detector = _SteadyStateDetector(pipeline)
    for taken, event in enumerate(itertools.islice(_Run(workload, num_minibatches), num_instructions), 1):
        if event.instruction.op in ENDS:
            found = detector.steady(event, (0.0, 0.0, 0.0, 0.0), sys.maxsize)  # in a segment of unlimited length
            if found is not None:
                return found.each.end_s / found.period, taken
    return detector.later_half_s(), taken


@without_collector()
def simulate_all(
    workload: Workload,
    num_minibatches: int,
    meter: Meter | None = None,
    *,
    first: int = -1,
    sampler: Sampler | None = None,
) -> SegmentTotals:
    """Simulate a whole segment: one that ends an epoch or, unless `first` is -1, that begins with minibatch `first`."""
    return _simulated(_Run(workload, num_minibatches, meter, ends_epoch=first < 0, sampler=sampler, first=first))


def _simulated(run: "_Run") -> SegmentTotals:
    for _ in run:
        pass
    return run.totals()


class _Run:
    """A segment being simulated, whose events are to be iterated over once.

    Args:
        workload, num_minibatches, meter, ends_epoch: as in `simulate_segment`.
        sampler: in place of the workload's.
        first: the first minibatch in the run; negative: all minibatches are whole except for an epoch's last.
    """

    def __init__(
        self,
        workload: Workload,
        num_minibatches: int,
        meter: Meter | None = None,
        *,
        ends_epoch: bool = True,
        sampler: Sampler | None = None,
        first: int = -1,
    ) -> None:
        pipeline, sampler = workload.pipeline, sampler or workload.sampler
        # Seconds by worker, as in `SegmentTotals`
        self.busy_s, self.again_s, self.stall_s, self.swap_stall_s = ([0.0] * pipeline.num_workers for _ in range(4))
        self._pipeline, self._meter = pipeline, meter
        observe = meter.transfer if meter else None
        self._network = Network(workload.cluster, workload.devices, observe, copies=bool(pipeline.swaps))
        self._sampler = sampler
        self._drawn: dict[int, Size] = {}  # sizes of units, if minibatches vary
        self._first = max(0, first)
        self._whole = sampler.sizes(0, pipeline.microbatches)
        self._alike = self._whole[0] if len({*self._whole}) == 1 else None  # of all units but the last ones
        last = sampler.sizes(sampler.minibatches_per_epoch - 1, pipeline.microbatches)
        size_of = self._drawn_size if sampler.varies or first >= 0 else self._size
        self._recomputed_s, self._size_of = recomputed_s(workload.costs), size_of
        self._last = dict(zip(pipeline.units(num_minibatches - 1), last, strict=True)) if ends_epoch else {}
        self._taken = [itertools.count() for _ in range(pipeline.num_workers)]
        # The counters count the instructions taken from each program without Python code per instruction.
        lists = zip(programs(pipeline, num_minibatches), self._taken, strict=True)
        self._lists: list[Iterator[Instruction]] = [
            map(operator.itemgetter(0), zip(each, taken, strict=False)) for each, taken in lists
        ]
        self._simulation = simulation_of(pipeline, self._lists, workload.costs, self._network, size_of)
        if meter is not None:
            meter.begin(size_of, recomputing(workload.costs, size_of))

    def __iter__(self) -> Iterator[TimelineEvent]:
        busy_s, stall_s, meter, recomputed = self.busy_s, self.stall_s, self._meter, self._recomputed_s
        for event in self._simulation:
            start_s, end_s, worker, instruction, stalled_s = event
            if instruction.op in COMPUTED:
                busy_s[worker] += end_s - start_s
                if recomputed and instruction.op in FIRST_PARTS:
                    self.again_s[worker] += recomputed[instruction.stage][self._size_of(instruction.number)]
            elif stalled_s:
                stalls_s = self.swap_stall_s if instruction.op is Op.SWAP_IN else stall_s
                stalls_s[worker] += stalled_s
            if meter is not None:
                meter.event(event)
            yield event

    def spent(self, worker: int) -> _Spent:
        """Return a worker's seconds so far."""
        return self.busy_s[worker], self.stall_s[worker], self.again_s[worker], self.swap_stall_s[worker]

    def shorten(self, num_minibatches: int) -> None:
        """Switch to the programs of a shorter segment, which begin with the instructions executed so far."""
        if self._last:
            self._last = dict(zip(self._pipeline.units(num_minibatches - 1), self._last.values(), strict=True))
        for worker, instructions in enumerate(programs(self._pipeline, num_minibatches)):
            self._lists[worker] = itertools.islice(instructions, next(self._taken[worker]), None)

    def totals(self) -> SegmentTotals:
        """Return the totals so far."""
        end_s = self._simulation.end_s
        return SegmentTotals(
            end_s, math.fsum(self.busy_s), math.fsum(self.stall_s), self._network.num_bytes,
            again_s=math.fsum(self.again_s), swap_stall_s=math.fsum(self.swap_stall_s),
        )  # fmt: skip

    def _size(self, unit: int) -> Size:
        size = self._last.get(unit, self._alike)
        return self._whole[self._pipeline.minibatch(unit)[1]] if size is None else size

    def _drawn_size(self, unit: int) -> Size:
        """Return a unit's size if minibatches vary."""
        size = self._last.get(unit, self._drawn.get(unit))
        if size is None:
            minibatch, _ = self._pipeline.minibatch(unit)
            sizes = self._sampler.sizes(self._first + minibatch, self._pipeline.microbatches)
            self._drawn |= zip(self._pipeline.units(minibatch), sizes, strict=True)
            size = self._drawn[unit]
        return size


@dataclass(frozen=True)
class _Steady:
    """A steady state."""

    period: int  # minibatches after which everything repeats
    each: SegmentTotals  # of a period, without its bytes
    left_out: int  # periods that need not be simulated
    error_s: float = 0.0  # standard error of a period's duration if periods don't repeat exactly


class _SteadyStateDetector:
    """Detects when the times of all workers' backwards repeat, shifted by one constant.

    A period may have several blocks, because a link that two stages share can make blocks alternate.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        workers = range(pipeline.num_workers)
        self._block = pipeline.period
        self._ends: list[list[float]] = [[] for _ in workers]
        self._sums: list[list[_Spent]] = [[] for _ in workers]  # at each end
        units = self._block * pipeline.microbatches
        self._own = [sum(units // pipeline.replicas[each] for each in pipeline.stages_of(w)) for w in workers]
        self._in_flight = math.ceil(max(pipeline.warmups) * pipeline.replicas[0] / self._block) * self._block

    def steady(self, event: TimelineEvent, spent: _Spent, num_minibatches: int) -> _Steady | None:
        """Record a unit's end; return the steady state if there is one and the segment is long enough."""
        worker, own, ends = event.worker, self._own, self._ends
        ends[worker].append(event.end_s)
        self._sums[worker].append(spent)
        if worker > 0 or len(ends[0]) % own[0] > 0:
            return None
        for blocks in _BLOCKS:
            shifts = [self._shift(each, blocks) for each in self._first_and_others(blocks)]
            # If workers have different rates, a queue fills or empties, which can't last.
            if max(shifts) - min(shifts) <= _TOLERANCE * ends[0][-1]:
                return self._found(blocks, shifts[0], num_minibatches)
        ended = len(ends[0]) // own[0]
        enough = ended * self._block >= _PATIENCE and ended >= 2 * _BATCHES
        return self._mean(num_minibatches) if enough else None

    def _mean(self, num_minibatches: int) -> _Steady | None:
        """Return the later half of what was simulated as a steady state, with its standard error."""
        ended = [len(ends) // own for ends, own in zip(self._ends, self._own, strict=True)]
        if (max(ended) - min(ended) - 1) * self._block > self._in_flight:
            return None  # workers with different rates end one by one, so the rate of the first isn't the segment's
        ends, own = self._ends[0], self._own[0]
        blocks = len(ends) // own // 2 // _BATCHES * _BATCHES
        marks = ends[len(ends) - 1 - own * blocks :: own * blocks // _BATCHES]
        parts = [b - a for a, b in itertools.pairwise(marks)]
        found = self._found(blocks, ends[-1] - ends[-1 - own * blocks], num_minibatches)
        return found and replace(found, error_s=statistics.stdev(parts) * math.sqrt(_BATCHES))

    def later_half_s(self) -> float:
        """Return the seconds per minibatch of the slowest worker, over the later half of its units."""
        slowest_s = 0.0
        for ends, own in zip(self._ends, self._own, strict=True):
            middle = len(ends) // 2
            if middle < 2:
                return math.inf
            slowest_s = max(slowest_s, (ends[-1] - ends[middle]) / (len(ends) - 1 - middle) * own / self._block)
        return slowest_s

    def _first_and_others(self, blocks: int) -> range:
        """Return all workers, or only the first if its own last two periods differ."""
        ends, own = self._ends[0], self._own[0] * blocks
        if len(ends) <= 2 * own:
            return range(1)
        differ = abs(ends[-1] - 2 * ends[-1 - own] + ends[-1 - 2 * own]) > _TOLERANCE * ends[-1]
        return range(1 if differ else len(self._own))

    def _shift(self, worker: int, blocks: int) -> float:
        """Return the duration of a worker's last periods if they agree in every backward, else infinity."""
        ends, own = self._ends[worker], self._own[worker] * blocks
        if len(ends) < (_REPEATS + 1) * own:
            return math.inf
        tail = ends[-(_REPEATS + 1) * own :]
        steps = [b - a for a, b in zip(tail, tail[own:], strict=False)]
        return steps[0] if max(steps) - min(steps) <= _TOLERANCE * tail[-1] else math.inf

    def _found(self, blocks: int, shift_s: float, num_minibatches: int) -> _Steady | None:
        period = self._block * blocks
        done = max(math.ceil(len(ends) / own) for ends, own in zip(self._ends, self._own, strict=True)) * self._block
        # In a segment shorter by these periods, no worker has started anything beyond its end, or is near it.
        left_out = (num_minibatches - done - 2 * self._in_flight - period) // period
        if left_out < 1:
            return None
        before = [sums[-1 - own * blocks] for sums, own in zip(self._sums, self._own, strict=True)]
        after = [sums[-1] for sums in self._sums]
        spent: dict[str, Any] = {
            name: math.fsum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i, name in enumerate(_SECONDS)
        }
        return _Steady(period, replace(NOTHING, end_s=shift_s, **spent), left_out)
