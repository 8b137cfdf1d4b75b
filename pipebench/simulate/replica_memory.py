"""What every instruction allocates and frees on one replica of one stage.

It knows no clock: a change is at the start of its instruction or at the end. What an instruction allocates counts from
its start, what it frees until its end, so that in between a replica never holds more than is counted.
"""

from collections.abc import Iterator
from typing import NamedTuple

from pipebench.model.sampling import Size
from pipebench.schedule.instructions import BACKWARDS, Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.version_ledger import VersionLedger
from pipebench.simulate import kinds
from pipebench.simulate.memory import StageMemoryCosts

_PASSES = (Op.FORWARD, *BACKWARDS)


class Change(NamedTuple):
    """Bytes that come, or go where they are negative."""

    kind: str  # what they are for, one of `memory.KINDS`, or `memory.ON_HOST`
    num_bytes: int  # how many
    at_end: bool  # whether that is when the instruction ends; else when it starts


class ReplicaMemory:
    """One replica of one stage, which keeps what `memory` says."""

    def __init__(self, memory: StageMemoryCosts) -> None:
        self._memory = memory
        self._versions = VersionLedger(in_place=memory.in_place)
        self._units: dict[int, tuple[int, int]] = {}  # in flight: the version, and what is kept
        self._gradients = 0
        self._has_state = False
        self._moved: tuple[int, int] | None = None  # of the last forward: the version, and how far from it
        self._shared = False  # whether its weights outlive an update
        self._is_retired = False
        self._is_gathered = memory.weights == memory.gathered  # where all are kept, gathers take no memory of their own

    def copied(self, memory: StageMemoryCosts) -> "ReplicaMemory":
        """Return a replica of other layers that continues from this one's newest weights and optimizer state.

        Of the weights and state in `memory` it has everything.
        """
        made = ReplicaMemory(memory)
        made._versions, made._has_state = self._versions.copied(), self._has_state
        return made

    def trained(self) -> "ReplicaMemory":
        """Return the same after an update: the optimizer has its state."""
        self._has_state = True
        return self

    def created(self) -> Iterator[Change]:
        """Yield what it holds, as of the start of the instruction that creates it."""
        for kind, held in self._by_kind().items():
            yield Change(kind, held, False)

    def dropped(self, *, at_end: bool) -> Iterator[Change]:
        """Yield what it has held, when it is dropped."""
        for kind, held in self._by_kind().items():
            yield Change(kind, -held, at_end)

    def retire(self) -> Iterator[Change]:
        """Make no more updates; what units in flight need stays until they have left."""
        before = self._by_kind()
        self._is_retired = True
        self._versions.retire()
        for kind, held in self._by_kind().items():
            yield Change(kind, held - before[kind], True)

    def drop_unit(self, unit: int) -> Iterator[Change]:
        """Drop a unit in flight: its backward is over, or runs elsewhere."""
        alive = len(self._versions.alive)
        version, num_bytes = self._units.pop(unit)
        yield Change(kinds.ACTIVATIONS, -num_bytes, True)
        if version >= 0:
            self._versions.release(version)
            yield from self._of_versions(alive, at_end=True)
        if self._is_retired and not self._units:
            yield Change(kinds.WEIGHTS, -self._memory.untrained, True)

    def give_gradients(self) -> int:
        """Return the bytes of the gradients, which another replica counts from now on."""
        given, self._gradients = self._gradients, 0
        return given

    def drained(self) -> Iterator[Change]:
        """Begin a segment: only the newest version is alive."""
        alive = len(self._versions.alive)
        self._versions.restart(0)
        self._moved = None
        yield from self._of_versions(alive, at_end=False)

    def before(self) -> Iterator[Change]:
        """Yield what is there before anything runs."""
        memory = self._memory
        yield Change(kinds.WEIGHTS, memory.untrained + memory.weights, False)
        yield Change(kinds.MASTERS, memory.masters, False)
        yield Change(kinds.MOVED, memory.copies * memory.weights, False)
        yield Change(kinds.STATE, memory.state * self._has_state, False)

    def changes(self, it: Instruction, size: Size) -> Iterator[Change]:
        """Yield what an instruction of this stage and replica changes, in order; `size` is of its unit."""
        if it.op in _PASSES and (workspace := self._memory.workspace[size]):
            yield from (Change(kinds.WORKSPACES, workspace, False), Change(kinds.WORKSPACES, -workspace, True))
        if it.op is Op.FORWARD:
            yield from self._forward(it, size)
        elif it.op is Op.BACKWARD:
            yield from self._backward(it, size)
        elif it.op is Op.BACKWARD_INPUT:
            yield from self._backward_input(it, size)
        elif it.op is Op.BACKWARD_WEIGHT:
            yield from self._backward_weight(it, size)
        elif it.op is Op.SWAP_OUT:
            yield Change(kinds.ON_HOST, self._memory.swapped[size], False)
            yield Change(kinds.ACTIVATIONS, -self._memory.swapped[size], True)
        elif it.op is Op.SWAP_IN:
            yield Change(kinds.ACTIVATIONS, self._memory.swapped[size], False)
            yield Change(kinds.ON_HOST, -self._memory.swapped[size], True)
        elif it.op in (Op.WAIT_ALL_REDUCE, Op.WAIT_TIED):
            yield self._gradients_are(self._memory.gathered, at_end=True)
        elif it.op is Op.WAIT_SCATTER:
            yield self._gradients_are(self._memory.scattered, at_end=True)
        elif it.op is Op.GATHER and not self._is_gathered:
            self._is_gathered = True
            yield Change(kinds.GATHERED, self._memory.gathered, False)
        elif it.op is Op.FREE:
            self._is_gathered = False
            yield Change(kinds.GATHERED, -self._memory.gathered, True)
        elif it.op is Op.UPDATE:
            yield from self._update(it)

    def _forward(self, it: Instruction, size: Size) -> Iterator[Change]:
        memory = self._memory
        if size == 0:
            return
        if memory.copies and self._moved != (it.version, it.ahead):
            self._moved = it.version, it.ahead
            if self._shared:
                self._shared = False
                yield Change(kinds.MOVED, -memory.weights, False)
        self._units[it.number] = it.version, memory.unit[size]
        if it.version >= 0:
            self._versions.use(it.version)
        yield Change(kinds.RECEIVED, memory.relayed[size] - memory.received[size], False)
        yield Change(kinds.ACTIVATIONS, memory.unit[size], False)
        yield Change(kinds.RECEIVED, -memory.relayed[size], True)

    def _backward(self, it: Instruction, size: Size) -> Iterator[Change]:
        if size == 0:
            return
        yield Change(kinds.AGAIN, self._memory.again[size], False)
        yield self._gradients_are(self._memory.gathered, at_end=False)
        yield Change(kinds.AGAIN, -self._memory.again[size], True)
        yield Change(kinds.RECEIVED, -self._memory.returned[size], True)
        yield from self.drop_unit(it.number)

    def _backward_input(self, it: Instruction, size: Size) -> Iterator[Change]:
        memory = self._memory
        if size == 0:
            return
        yield Change(kinds.AGAIN, memory.again[size], False)
        yield self._gradients_are(max(self._gradients, memory.early_gradients), at_end=False)
        yield Change(kinds.AGAIN, -memory.again[size], True)
        yield Change(kinds.RECEIVED, -memory.returned[size], True)
        version, num_bytes = self._units[it.number]
        self._units[it.number] = version, memory.rest[size]
        yield Change(kinds.ACTIVATIONS, memory.rest[size] - num_bytes, True)

    def _backward_weight(self, it: Instruction, size: Size) -> Iterator[Change]:
        if size != 0:
            yield self._gradients_are(self._memory.gathered, at_end=False)
            yield from self.drop_unit(it.number)

    def _update(self, it: Instruction) -> Iterator[Change]:
        memory, alive = self._memory, len(self._versions.alive)
        if self._gradients:  # they are turned into the type that the optimizer steps in
            yield self._gradients_are(memory.masters or memory.scattered, at_end=False)
        yield from self.make_state()
        if memory.shares_moved and it.version <= it.number and self._moved is not None and not self._shared:
            self._shared = True
            yield Change(kinds.MOVED, memory.weights, False)
        self._versions.step(it.version)
        yield from self._of_versions(alive, at_end=False)
        yield self._gradients_are(0, at_end=True)

    def make_state(self) -> Iterator[Change]:
        """Have the optimizer's state, which its first step makes."""
        if not self._has_state:
            self._has_state = True
            yield Change(kinds.STATE, self._memory.state, False)

    def _by_kind(self) -> dict[str, int]:
        """Return what it holds between two instructions."""
        memory, alive, steps = self._memory, len(self._versions.alive), not self._is_retired
        return {
            kinds.WEIGHTS: memory.weights * steps + memory.untrained * (steps or bool(self._units)),
            kinds.VERSIONS: memory.weights * (alive - steps),
            kinds.MASTERS: memory.masters * steps,
            kinds.STATE: memory.state * (self._has_state and steps),
            kinds.GRADIENTS: self._gradients,
            kinds.ACTIVATIONS: sum(num_bytes for _, num_bytes in self._units.values()),
        }

    def _gradients_are(self, num_bytes: int, *, at_end: bool) -> Change:
        change = Change(kinds.GRADIENTS, num_bytes - self._gradients, at_end)
        self._gradients = num_bytes
        return change

    def _of_versions(self, before: int, *, at_end: bool) -> Iterator[Change]:
        yield Change(kinds.VERSIONS, (len(self._versions.alive) - before) * self._memory.weights, at_end)
