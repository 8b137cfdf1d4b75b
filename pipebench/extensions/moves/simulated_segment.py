"""A simulated segment: its totals, and workers' memory if layers move in it."""

import math
from collections.abc import Callable
from functools import lru_cache, partial

from pipebench.engine.segment import Segment, SizeOf
from pipebench.engine.setup import Setup
from pipebench.extensions.moves.migration_memory import Inputs, MigrationMemory, SegmentBytes
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.extensions.moves.segment import MovingSegment
from pipebench.extensions.moves.settings import MOVES
from pipebench.model.sampling import Size
from pipebench.schedule.operations import Op
from pipebench.simulate.meter import Meter
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.steady import SegmentTotals
from pipebench.simulate.timeline import Transfer

_SIZES_CACHED = 1024  # more than there are units in flight


class SimulatedSegment(Segment):
    """A simulated segment, with its cuts if layers may move.

    It begins with minibatch `first` of the run at `start_s` on the run's clock; `inputs` are bytes of the model's
    inputs by size of the unit.
    """

    def __init__(
        self,
        setup: Setup,
        phases: MovingSegment | None,
        first: int,
        num_minibatches: int,
        start_s: float = 0.0,
        inputs: Inputs | None = None,
    ) -> None:
        super().__init__(setup, {} if phases is None else {MOVES: phases}, first, num_minibatches)
        self._phases = phases
        self._start_s, self._inputs = start_s, inputs or {}
        self._drains_at = self._enough = 0
        self.is_quiet = False  # whether `enough` minibatches have run without a move
        self.began_s: dict[int, float] = {}  # start times of the run's minibatches at which layers move
        self.memory: MigrationMemory | None = None  # of every worker, if layers may move

    @property
    def changed_at(self) -> int:
        """The first minibatch under the last cuts, possibly after the segment; 0: no move."""
        return self.announced[-1].at if self.announced else self._drains_at

    @property
    def announced(self) -> tuple[Repartition, ...]:
        """The live moves; those that the segment ends before are made at its end."""
        return () if self._phases is None else self._phases.announced

    def end_at(self, minibatch: int) -> None:
        """End before a minibatch, for a move there."""
        self._drains_at = minibatch
        super().end_at(minibatch)

    def played(
        self,
        meter: Meter | None = None,
        on_event: Callable[[TimelineEvent, SizeOf], None] | None = None,
        on_memory: Callable[[TimelineEvent, int], None] | None = None,
        enough: int = 0,
    ) -> SegmentTotals:
        """Simulate it; return its totals.

        `meter` records every event and transfer; `on_event` is called with every event and the function from units to
        sizes, `on_memory` afterwards with the worker's peak bytes within it, without messages. Simulation may stop
        after `enough` minibatches without a move; 0: never.
        """
        setup, pipeline, self._enough = self._setup, self._setup.pipeline, enough
        meter = meter or Meter(pipeline)
        size_of = lru_cache(maxsize=_SIZES_CACHED)(self._size_of)
        network = Network(setup.cluster, setup.devices, partial(self._transferred, meter), copies=setup.copies)
        simulation = self.simulation(network, size_of, self._start_s, meter)
        if self._phases is not None:
            self.memory = MigrationMemory(self._phases, self._phases.moving, size_of, self._inputs, self._start_s)
        plain = SegmentBytes(setup, size_of, self._inputs, self._start_s) if on_memory and not self.memory else None
        holds = self.memory or plain
        before = _counted(meter)
        for event in simulation:
            if on_event is not None:
                on_event(event, size_of)
            meter.event(event)
            held_bytes = holds.event(event) if holds is not None else 0
            if on_memory is not None:
                on_memory(event, held_bytes)
            if event.instruction.op is Op.FORWARD and event.instruction.stage == 0:
                self._begun(pipeline.minibatch(event.instruction.number)[0], event.start_s)
        busy_s, stall_s, again_s, swap_s = (b - a for a, b in zip(before, _counted(meter), strict=True))
        took_s, num_bytes = simulation.end_s - self._start_s, network.num_bytes
        return SegmentTotals(took_s, busy_s, stall_s, num_bytes, again_s=again_s, swap_stall_s=swap_s)

    def _transferred(self, meter: Meter, transfer: Transfer) -> None:
        meter.transfer(transfer)
        if self.memory is not None:
            self.memory.transfer(transfer)

    def _size_of(self, unit: int) -> Size:
        minibatch, microbatch = self._setup.pipeline.minibatch(unit)
        return self._setup.sampler.sizes(self._first + minibatch, self._setup.pipeline.microbatches)[microbatch]

    def _begun(self, minibatch: int, start_s: float) -> None:
        """Shorten the segment once `enough` minibatches have run since the last change, after reaching steady state."""
        since = minibatch - self.changed_at
        if any(move.at == minibatch for move in self.announced):
            self.began_s.setdefault(self._first + minibatch, start_s)
        if not self._enough or self.is_quiet or self._drains_at or since < self._enough:
            return
        self.is_quiet = True
        grain = math.lcm(self._setup.pipeline.period, self._setup.sampler.streams or 1)
        end = math.ceil((minibatch + 1 + 8 * self._setup.pipeline.depth) / grain) * grain
        if end < self._num_minibatches:
            self._admission.end_at(end)


def _counted(meter: Meter) -> tuple[float, float, float, float]:
    return meter.busy_s, meter.stall_s, meter.again_s, meter.swap_stall_s
