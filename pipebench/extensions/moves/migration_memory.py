"""Predicted memory while layers move: the bytes of `migration`, from the profile and simulated events alone.

Each replica of a stage is a `ReplicaMemory` of its layers: its parts, retired replicas that still run backwards, and
guests that recompute transferred units. A `MemoryMeter` orders their changes in time and adds bytes in transit:
messages, units and blocks of layers.

`HeldBytes` counts what engines count as live tensors and report to Algorithm 1 (vPipe, TPDS'21, section 4.2). Within an
instruction, results count from its start and inputs until its end, so every kind of bytes counts at its peak
(docs/memory.md). Messages are not counted.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from pipebench.engine.setup import Setup
from pipebench.extensions.moves.segment import MovingSegment, PhaseCosts
from pipebench.extensions.moves.stage_parts import StagePart, StageParts
from pipebench.model.plan import StagePlan
from pipebench.model.sampling import Size
from pipebench.schedule.instructions import BACKWARDS, COPIES, Instruction
from pipebench.schedule.operations import ACTIVATION, GRADIENT, MIGRATION, RECEIVE, Op, with_kind
from pipebench.simulate import kinds
from pipebench.simulate.memory import StageMemoryCosts, layers_memory, stage_memories
from pipebench.simulate.memory_meter import MemoryMeter, MemoryTimeline
from pipebench.simulate.replica_memory import Change, ReplicaMemory
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import Transfer

Inputs = Mapping[Size, Mapping[str, int]]  # bytes of every model input by name, by size of the unit

# The field of `replica.LiveBytes` in which engines count each kind, by its position; others aren't counted. Units that
# wait to be transferred count until they are sent.
_COUNTED: Final = {
    kinds.WEIGHTS: 0, kinds.VERSIONS: 0, kinds.MOVED: 1, kinds.MASTERS: 2, kinds.STATE: 2, kinds.GRADIENTS: 3,
    kinds.ACTIVATIONS: 4, kinds.SENT: 4, kinds.AGAIN: 5,
}  # fmt: skip
_OF_A_UNIT: Final = (Op.FORWARD, *BACKWARDS, *COPIES)


class HeldBytes:
    """Adds up one worker's bytes, as engines count them."""

    def __init__(self) -> None:
        self.now = 0  # peak within the latest instruction
        self.most = 0  # peak over all instructions
        self._live = [0] * (1 + max(_COUNTED.values()))

    def noted(self, changes: Iterable[Change]) -> Iterator[Change]:
        """Yield an instruction's changes, and count each as it passes."""
        most = [*self._live]
        for change in changes:
            kind = _COUNTED.get(change.kind)
            if kind is not None:
                self._live[kind] += change.num_bytes
                most[kind] = max(most[kind], self._live[kind])
            yield change
        self.now = sum(most)
        self.most = max(self.most, self.now)


class SegmentBytes:
    """Tracks each worker's bytes in a segment of a straight pipeline whose layers don't move.

    Args:
        setup: the setup.
        size_of: returns a unit's size.
        inputs: bytes of the model's inputs.
        start_s: the run's clock at the segment's start; if above 0, the optimizer has made its state.
    """

    def __init__(self, setup: Setup, size_of: Callable[[int], Size], inputs: Inputs, start_s: float) -> None:
        made = (ReplicaMemory(each) for each in stage_memories(setup.profile, setup.plan, setup.pipeline, inputs))
        self._replicas = [each.trained() if start_s > 0 else each for each in made]
        self._held = [HeldBytes() for _ in self._replicas]
        self._size_of = size_of
        for held, replica in zip(self._held, self._replicas, strict=True):
            _exhaust(held.noted(replica.before()))

    def event(self, event: TimelineEvent) -> int:
        """Process an event; return its worker's peak bytes within it."""
        it, held = event.instruction, self._held[event.worker]
        if it.op is not Op.WAIT_NORM:
            size = self._size_of(it.number) if it.op in _OF_A_UNIT else 0
            _exhaust(held.noted(self._replicas[it.stage].changes(it, size)))
        return held.now


def held_at_once(before: Setup, after: Setup, *, trained: bool) -> Iterator[Counter[str]]:
    """Yield each worker's bytes by kind at a drain at which layers move.

    Nothing is in flight, and a worker has its stages twice: under the old cuts and under the new ones. `trained`:
    whether there have been updates.
    """
    memories = [stage_memories(each.profile, each.plan, each.pipeline) for each in (before, after)]
    for worker in range(before.pipeline.num_workers):
        by_kind = Counter[str]()
        for of_stages in memories:
            for stage in before.pipeline.stages_of(worker):
                replica = ReplicaMemory(of_stages[stage])
                for change in (replica.trained() if trained else replica).before():
                    by_kind[change.kind] += change.num_bytes
        yield by_kind


def _exhaust(changes: Iterable[Change]) -> None:
    deque(changes, maxlen=0)


_RECEIVES: Final = with_kind(RECEIVE, ACTIVATION, GRADIENT)


class MigrationMemory:
    """Tracks each worker's memory in a segment in which layers may move.

    Args:
        phases: the segment's cuts.
        costs: costs of instructions under them.
        size_of: returns a unit's size.
        inputs: bytes of the model's inputs.
        start_s: the run's clock at the segment's start; if above 0, the optimizer has made its state.
    """

    def __init__(
        self, phases: MovingSegment, costs: PhaseCosts, size_of: Callable[[int], Size], inputs: Inputs, start_s: float
    ) -> None:
        pipeline, limit_bytes = phases.setup.pipeline, phases.setup.cluster.memory_bytes
        self._stages = [
            _MigratingMemory(phases, costs, size_of, inputs, index, trained=start_s > 0)
            for index in range(pipeline.num_stages)
        ]
        holdings = [{index: stage} for index, stage in enumerate(self._stages)]
        self._meter = _MigrationMeter(pipeline, (), costs.costs, limit_bytes, holdings=holdings, start_s=start_s)
        self._meter.sizes = costs
        self._meter.begin(costs.size_of)

    def event(self, event: TimelineEvent) -> int:
        """Process an event; return its worker's peak bytes within it, without messages."""
        self._meter.event(event)
        return self._stages[event.worker].held.now

    def transfer(self, transfer: Transfer) -> None:
        """Process a transfer: its receiver holds its bytes from its start on, its sender until its end."""
        self._meter.transfer(transfer)

    @property
    def held(self) -> list[int]:
        """Each worker's peak bytes without messages, as engines count them."""
        return [stage.held.most for stage in self._stages]

    @property
    def peaks(self) -> list[int]:
        """Each worker's peak bytes at any moment, messages in transit included."""
        return [peak.num_bytes for peak in self.timeline().peaks]

    def timeline(self) -> MemoryTimeline:
        """Return each worker's memory over time."""
        return self._meter.timeline()


class _MigrationMeter(MemoryMeter):
    """A memory meter that also counts units and blocks of layers in transit."""

    between_stages = (ACTIVATION, GRADIENT, MIGRATION)
    sizes: PhaseCosts

    def _sent_bytes(self, it: Instruction) -> int:
        return self.sizes.num_bytes(it) if it.op in (Op.GIVE, Op.GIVE_UNIT) else super()._sent_bytes(it)


class _MigratingMemory:
    """The memory of one stage; mirrors `MigratingReplica`."""

    def __init__(
        self,
        phases: MovingSegment,
        costs: PhaseCosts,
        size_of: Callable[[int], Size],
        inputs: Inputs,
        index: int,
        *,
        trained: bool,
    ) -> None:
        self._phases, self._costs, self._size_of, self._inputs = phases, costs, size_of, inputs
        self._index = index
        stage = phases.setup.plan.stages[index]
        whole = self._make(stage.start, stage.stop, 0)
        self._parts = StageParts(StagePart(whole.trained() if trained else whole, stage.start, stage.stop))
        self._pending_transfers: dict[tuple[int, int], int] = {}  # bytes by unit and target stage
        self._gradients = 0  # bytes computed by replicas that make no updates
        self._arrived = {op: Counter[int]() for op in _RECEIVES}  # received bytes by unit, freed by the unit's pass
        self.held = HeldBytes()

    def before(self) -> Iterator[Change]:
        """Yield the memory before anything runs."""
        for part in self._parts:
            yield from self.held.noted(part.replica.created())

    def drained(self) -> Iterator[Change]:
        """Begin the only segment."""
        return iter(())

    def changes(self, it: Instruction, _: Size) -> Iterator[Change]:
        """Yield what an instruction changes, in order."""
        executed = self._executed(it, self._size_of(it.number) if it.op is not Op.UPDATE else 0)
        yield from self.held.noted(itertools.chain(executed, self._gathered()))

    def _executed(self, it: Instruction, size: Size) -> Iterator[Change]:
        op = it.op
        if op in _RECEIVES:
            self._arrived[op][it.number] += self._crossing_bytes(it)
        elif op is Op.FORWARD:
            yield from self._forward(it, size)
        elif op is Op.BACKWARD:
            yield from self._backward(it, size)
        elif op is Op.UPDATE:
            for part in self._parts:
                yield from part.replica.changes(it, size)
            yield Change(kinds.GRADIENTS, -self._gradients, True)
            self._gradients = 0
        elif op in COPIES:
            for replica in self._parts.ran_here(it.number):
                yield from replica.changes(it, size)
        elif op is Op.RECUT:
            if it.peer < 0:
                yield from self._replaced(*self._parts.renew(it.number, self._copy))
            else:
                block = self._phases.moving_block(it.stage, it.peer, it.number)
                yield from self._replaced(*self._parts.cut_off(block, self._copy))
        elif op is Op.GIVE:
            yield from self._parts.leave(it.peer).dropped(at_end=False)
        elif op is Op.GIVE_UNIT:
            yield Change(kinds.SENT, -self._pending_transfers.pop((it.number, it.peer), 0), False)
        elif op is Op.FORWARD_AGAIN:
            yield from self._forward_again(it, size)
        elif op is Op.TAKE:
            block = self._phases.moving_block(it.peer, it.stage, it.number)
            yield from self._replaced(*self._parts.join(block, self._copy))
            given = Instruction(Op.GIVE, it.peer, it.number, it.stage)
            yield Change(kinds.RECEIVED, -self._costs.num_bytes(given), True)

    def _gathered(self) -> Iterator[Change]:
        """Yield the changes by dropping guests, once one replica runs the stage again."""
        guests = self._parts.guests
        whole = self._parts.whole if guests else None
        # Else gradients are of layers that have yet to arrive.
        if whole and all(whole.start <= guest.start and guest.stop <= whole.stop for guest in guests.values()):
            for guest in guests.values():
                yield from guest.replica.dropped(at_end=True)
            guests.clear()

    def _forward(self, it: Instruction, size: Size) -> Iterator[Change]:
        if not size:
            return
        yield Change(kinds.RECEIVED, -self._arrived[Op.RECEIVE_ACTIVATION].pop(it.number, 0), False)
        for part in self._parts.begin(it.number):
            if part.leaves_to is not None:
                given = Instruction(Op.GIVE_UNIT, self._index, it.number, part.leaves_to)
                aside = self._pending_transfers[it.number, part.leaves_to] = self._costs.num_bytes(given)
                yield Change(kinds.SENT, aside, False)
            yield from part.replica.changes(it, size)
            if part.leaves_to is not None:
                yield from part.replica.drop_unit(it.number)

    def _backward(self, it: Instruction, size: Size) -> Iterator[Change]:
        changes: list[Change] = []
        for replica in self._parts.end(it.number):
            changes += replica.changes(it, size)
            if all(replica is not part.replica for part in self._parts):
                self._gradients += replica.give_gradients()
        # Replicas recompute one after the other.
        again = max([0, *(change.num_bytes for change in changes if change.kind == kinds.AGAIN)])
        yield Change(kinds.AGAIN, again, False)
        yield from (change for change in changes if change.kind != kinds.AGAIN)
        yield Change(kinds.AGAIN, -again, True)
        yield Change(kinds.RECEIVED, -self._arrived[Op.RECEIVE_GRADIENT].pop(it.number, 0), True)

    def _replaced(self, old: ReplicaMemory, made: list[ReplicaMemory]) -> Iterator[Change]:
        """Yield the changes by replacing a replica, which then makes no more updates, by others."""
        for replica in made:
            yield from replica.created()
        self._gradients += old.give_gradients()
        yield from old.retire()

    def _forward_again(self, it: Instruction, size: Size) -> Iterator[Change]:
        if not size:
            return
        block = self._phases.moving_block(it.peer, it.stage, it.number)
        given = Instruction(Op.GIVE_UNIT, it.peer, it.number, it.stage)
        read = self._costs.read_bytes(given)
        yield Change(kinds.RECEIVED, -read, False)  # counted as activations from now on
        is_new = block.source not in self._parts.guests
        guest = self._parts.guest(block, it.number, self._make)
        if is_new:
            yield from guest.created()
        yield from guest.changes(Instruction(Op.FORWARD, it.stage, it.number), size)
        yield Change(kinds.RECEIVED, read - self._costs.num_bytes(given), True)

    def _crossing_bytes(self, it: Instruction) -> int:
        costs, size = self._costs.costs, self._costs.size_of(it.number)
        if it.op is Op.RECEIVE_ACTIVATION:
            return costs.activation_bytes[it.peer, it.stage][size]
        return costs.gradient_bytes[it.stage, it.peer][size]

    def _make(self, start: int, stop: int, minibatch: int) -> ReplicaMemory:
        return ReplicaMemory(self._memory(start, stop, minibatch))

    def _copy(self, old: ReplicaMemory, start: int, stop: int, minibatch: int) -> ReplicaMemory:
        return old.copied(self._memory(start, stop, minibatch))

    def _memory(self, start: int, stop: int, minibatch: int) -> StageMemoryCosts:
        """Return the memory costs of layers [start, stop), with the policies of a minibatch's forward."""
        setup = self._phases.setup
        cut = StagePlan(start, stop, 1, (0,), self._phases.policies(minibatch)[start:stop])
        return layers_memory(setup.profile, cut, setup.pipeline, self._index, self._inputs)
