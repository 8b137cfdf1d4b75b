"""A simulated segment of training in which layers may move: its totals, and each worker's memory."""

import math
from collections.abc import Callable
from functools import lru_cache, partial

from pipebench.engine.segment import Segment, SizeOf
from pipebench.engine.setup import Setup
from pipebench.extensions.moves.migration_memory import Inputs, MigrationMemory, SegmentBytes
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.extensions.moves.segment import SIZES_CACHED, MovingSegment
from pipebench.extensions.moves.settings import MOVES
from pipebench.model.sampling import Size
from pipebench.schedule.operations import Op
from pipebench.simulate.meter import Meter
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.steady import SegmentTotals
from pipebench.simulate.timeline import Transfer


class SimulatedSegment(Segment):
    """A simulated segment of training.

    Args:
        setup: the setup at its start.
        phases: its cuts, or None if layers can't move.
        first: the run's minibatches before it.
        num_minibatches: its length.
        start_s: the run's clock at its start.
        inputs: bytes of the model's inputs.
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
        self._drains_at = 0  # the minibatch of a move at a drain that ends the segment; 0: none
        self._enough = 0
        self.is_quiet = False  # whether `enough` minibatches have run without a move
        self.began_s: dict[int, float] = {}  # start times of the run's minibatches from which on new cuts hold
        self.memory: MigrationMemory | None = None  # of every worker, if layers may move

    @property
    def changed_at(self) -> int:
        """The first minibatch under the last cuts, which may be after the segment's end; 0: no move."""
        return self.announced[-1].at if self.announced else self._drains_at

    @property
    def announced(self) -> tuple[Repartition, ...]:
        """The live moves; any that come after the segment's last minibatch are made at its end."""
        return () if self._phases is None else self._phases.announced

    def end_at(self, minibatch: int) -> None:
        """End the segment before a minibatch, for a move at that drain."""
        self._drains_at = minibatch
        super().end_at(minibatch)

    def played(
        self,
        meter: Meter | None = None,
        on_event: Callable[[TimelineEvent, SizeOf], None] | None = None,
        on_memory: Callable[[TimelineEvent, int], None] | None = None,
        enough: int = 0,
    ) -> SegmentTotals:
        """Simulate the segment; return its totals.

        Args:
            meter: records every event and transfer.
            on_event: called with every event, and with the function that returns a unit's size.
            on_memory: called after `on_event` with the event, and with the worker's peak bytes within it, messages
                left out.
            enough: minibatches without a move after which the simulation may stop; 0: it doesn't.
        """
        setup, pipeline, self._enough = self._setup, self._setup.pipeline, enough
        meter = meter or Meter(pipeline)
        size_of = lru_cache(maxsize=SIZES_CACHED)(self._size_of)
        network = Network(setup.cluster, setup.devices, partial(self._transferred, meter), copies=setup.copies)
        simulation = self.simulation(network, size_of, self._start_s, meter)
        if self._phases is not None:
            self.memory = MigrationMemory(self._phases, self._phases.moving, size_of, self._inputs, self._start_s)
        plain = SegmentBytes(setup, size_of, self._inputs, self._start_s) if on_memory and not self.memory else None
        tracker = self.memory or plain
        before = _counted(meter)
        for event in simulation:
            if on_event is not None:
                on_event(event, size_of)
            meter.event(event)
            held_bytes = tracker.event(event) if tracker is not None else 0
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
        """Record when a move's first minibatch begins, and end the segment early once it is quiet.

        It is quiet if `enough` minibatches have run since the last move. It ends after its steady state is reached.
        """
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
