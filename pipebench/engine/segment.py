"""A segment of training in which layers may move, from durations alone: the lists, costs and links of an engine."""

import math
from collections.abc import Callable
from functools import lru_cache

from pipebench.engine.admission import StoppableAdmission, StopRequest, admitted_program
from pipebench.engine.held_bytes import Inputs, SegmentBytes
from pipebench.engine.migration_costs import PhaseCosts
from pipebench.engine.migration_memory import MigrationMemory
from pipebench.engine.segment_cuts import SegmentCuts
from pipebench.engine.setup import Setup
from pipebench.model.sampling import Size
from pipebench.schedule.moves import Repartition
from pipebench.schedule.operations import Op
from pipebench.simulate.meter import Meter
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import Simulation, TimelineEvent
from pipebench.simulate.steady import SegmentTotals
from pipebench.simulate.timeline import Transfer

_SIZES_KEPT = 1024  # more than there are units in flight

SizeOf = Callable[[int], Size]


class Segment:
    """A segment that is played.

    Args:
        setup: what is run.
        phases: the cuts, where layers may move meanwhile.
        first: the minibatch of the run that it begins with.
        num_minibatches: its length.
        start_s: the run's clock when it begins.
        meter: takes note of every event and transfer.
        told: is told of every event as it comes, with what tells a unit's size.
        held: is told afterwards what the event's worker held within it at most, messages aside.
        enough: minibatches without a move after which the rest needn't be played; 0: all is.
        inputs: bytes of the model's inputs, by size of the unit.

    Attributes:
        memory: what every worker holds, where layers may move meanwhile.
        is_quiet: whether that many have run.
        began_s: when the minibatches began at which layers move, numbered from the run's first.
    """

    def __init__(
        self,
        setup: Setup,
        phases: SegmentCuts | None,
        first: int,
        num_minibatches: int,
        start_s: float,
        meter: Meter | None = None,
        told: Callable[[TimelineEvent, SizeOf], None] | None = None,
        held: Callable[[TimelineEvent, int], None] | None = None,
        enough: int = 0,
        inputs: Inputs | None = None,
    ) -> None:
        self._setup, self._phases, self._start_s = setup, phases, start_s
        self._meter = meter or Meter(setup.pipeline)
        self._told, self._held, self._enough = told, held, enough
        self._num_minibatches, self._first = num_minibatches, first
        self._grain = math.lcm(setup.pipeline.period, setup.sampler.streams or 1)
        self._drains_at = 0
        self.is_quiet = False
        self.began_s: dict[int, float] = {}
        self.memory: MigrationMemory | None = None
        self._inputs = inputs or {}
        self._admission = StoppableAdmission(
            StopRequest(), setup.pipeline, num_minibatches, self._grain, lambda cut: None
        )

    @property
    def limit(self) -> int:
        """Minibatches that are played."""
        return self._admission.limit

    @property
    def changed_at(self) -> int:
        """The first minibatch under the last cuts, those after the segment included; 0: there are no others."""
        return self._announced[-1].at if self._announced else self._drains_at

    @property
    def _announced(self) -> tuple[Repartition, ...]:
        return () if self._phases is None else self._phases.routes.moves.announced

    def end_at(self, minibatch: int) -> None:
        """End before a minibatch, to move there."""
        self._drains_at = minibatch
        self._admission.end_at(minibatch)

    def played(self) -> SegmentTotals:
        """Play it, and return what that comes to."""
        setup, phases, pipeline, meter = self._setup, self._phases, self._setup.pipeline, self._meter
        size_of = lru_cache(maxsize=_SIZES_KEPT)(self._size_of)
        costs, sizes, moving = setup.costs, size_of, None
        if phases is not None:
            moving = PhaseCosts(phases, size_of, lambda unit: pipeline.minibatch(unit)[0])
            costs, sizes = moving.costs, moving.size_of
            self.memory = MigrationMemory(phases, moving, size_of, self._inputs, self._start_s)
        plain = SegmentBytes(setup, size_of, self._inputs, self._start_s) if self._held and not self.memory else None
        holds = self.memory or plain
        routes, count = None if phases is None else phases.routes, self._num_minibatches
        lists = [admitted_program(pipeline, w, count, self._admission, routes) for w in range(pipeline.num_workers)]
        network = Network(setup.cluster, setup.devices, self._transferred, copies=setup.copies)
        simulation = Simulation(pipeline, lists, costs, network, sizes, self._start_s, moving=moving)
        meter.begin(size_of, None if moving is None else moving.recomputing_s)
        before = meter.busy_s, meter.stall_s, meter.again_s, meter.swap_stall_s
        for event in simulation:
            if self._told is not None:
                self._told(event, size_of)
            meter.event(event)
            if holds is not None:
                num_bytes = holds.event(event)
                if self._held is not None:
                    self._held(event, num_bytes)
            if event.instruction.op is Op.FORWARD and event.instruction.stage == 0:
                self._begun(pipeline.minibatch(event.instruction.number)[0], event.start_s)
        after = meter.busy_s, meter.stall_s, meter.again_s, meter.swap_stall_s
        busy_s, stall_s, again_s, swap_stall_s = (b - a for a, b in zip(before, after, strict=True))
        return SegmentTotals(
            simulation.end_s - self._start_s, busy_s, stall_s, network.num_bytes,
            again_s=again_s, swap_stall_s=swap_stall_s,
        )  # fmt: skip

    def _transferred(self, transfer: Transfer) -> None:
        """Tell who takes note of transfers."""
        self._meter.transfer(transfer)
        if self.memory is not None:
            self.memory.transfer(transfer)

    def _size_of(self, unit: int) -> Size:
        minibatch, microbatch = self._setup.pipeline.minibatch(unit)
        return self._setup.sampler.sizes(self._first + minibatch, self._setup.pipeline.microbatches)[microbatch]

    def _begun(self, minibatch: int, start_s: float) -> None:
        """End as soon as enough has run since the last change, and let the pipeline become steady before that."""
        since = minibatch - self.changed_at
        if any(move.at == minibatch for move in self._announced):
            self.began_s.setdefault(self._first + minibatch, start_s)
        if not self._enough or self.is_quiet or self._drains_at or since < self._enough:
            return
        self.is_quiet = True
        end = math.ceil((minibatch + 1 + 8 * self._setup.pipeline.depth) / self._grain) * self._grain
        if end < self._num_minibatches:
            self._admission.end_at(end)
