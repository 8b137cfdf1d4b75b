"""What every instruction allocates and frees on one replica of one stage.

There is no clock: a change is at the start or at the end of its instruction. What an instruction allocates counts from
its start, and what it frees until its end, so that a replica never holds more than is counted.
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
    """Bytes that an instruction allocates, or frees if they are negative."""

    kind: str  # one of `kinds.KINDS`, or `kinds.ON_HOST`
    num_bytes: int
    at_end: bool  # whether at the instruction's end; else at its start


class ReplicaMemory:
    """The memory of one replica of one stage, whose sizes are `memory`."""

    def __init__(self, memory: StageMemoryCosts) -> None:
        self._memory = memory
        self._versions = VersionLedger(in_place=memory.in_place)
        self._units: dict[int, tuple[int, int]] = {}  # in flight: the version, and the bytes kept
        self._gradients = 0  # bytes
        self._has_state = False
        # Of the last forward with predicted weights: the version, and the updates that it is predicted ahead by
        self._moved: tuple[int, int] | None = None
        self._shared = False  # whether those predicted weights outlive an update
        self._is_retired = False
        # Replicas that hold whole weights need no memory for gathers
        self._is_gathered = memory.weights == memory.gathered

    def copied(self, memory: StageMemoryCosts) -> "ReplicaMemory":
        """Return a replica of other layers that continues from this one's newest weights and optimizer state.

        It holds all weights and state of `memory`.
        """
        made = ReplicaMemory(memory)
        made._versions, made._has_state = self._versions.copied(), self._has_state
        return made

    def trained(self) -> "ReplicaMemory":
        """Count the optimizer's state as held, as after an update; return the replica."""
        self._has_state = True
        return self

    def created(self) -> Iterator[Change]:
        """Yield the bytes it holds as changes at the start of the instruction that creates it."""
        for kind, held in self._by_kind().items():
            yield Change(kind, held, False)

    def dropped(self, *, at_end: bool) -> Iterator[Change]:
        """Yield the bytes it holds as changes that free them."""
        for kind, held in self._by_kind().items():
            yield Change(kind, -held, at_end)

    def retire(self) -> Iterator[Change]:
        """Make no more updates; free what units in flight don't need."""
        before = self._by_kind()
        self._is_retired = True
        self._versions.retire()
        for kind, held in self._by_kind().items():
            yield Change(kind, held - before[kind], True)

    def drop_unit(self, unit: int) -> Iterator[Change]:
        """Free what a unit in flight holds: its backward has ended, or runs on another replica."""
        alive = len(self._versions.alive)
        version, num_bytes = self._units.pop(unit)
        yield Change(kinds.ACTIVATIONS, -num_bytes, True)
        if version >= 0:
            self._versions.release(version)
            yield from self._of_versions(alive, at_end=True)
        if self._is_retired and not self._units:
            yield Change(kinds.WEIGHTS, -self._memory.untrained, True)

    def give_gradients(self) -> int:
        """Return the bytes of the gradients, which another replica holds from now on."""
        given, self._gradients = self._gradients, 0
        return given

    def drained(self) -> Iterator[Change]:
        """Begin a segment, in which only the newest version is alive."""
        alive = len(self._versions.alive)
        self._versions.restart(0)
        self._moved = None
        yield from self._of_versions(alive, at_end=False)

    def before(self) -> Iterator[Change]:
        """Yield the bytes held before anything runs, as changes."""
        memory = self._memory
        yield Change(kinds.WEIGHTS, memory.untrained + memory.weights, False)
        yield Change(kinds.MASTERS, memory.masters, False)
        yield Change(kinds.MOVED, memory.copies * memory.weights, False)
        yield Change(kinds.STATE, memory.state * self._has_state, False)

    def changes(self, it: Instruction, size: Size) -> Iterator[Change]:
        """Yield the changes of an instruction of this replica, in order; `size` is of its unit."""
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
        elif it.op in (Op.WAIT_ALL_REDUCE, Op.WAIT_SCATTER, Op.WAIT_TIED):
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
        if self._gradients:  # converted to the type in which the optimizer steps
            yield self._gradients_are(memory.masters or memory.scattered, at_end=False)
        yield from self.make_state()
        if memory.shares_moved and it.version <= it.number and self._moved is not None and not self._shared:
            self._shared = True
            yield Change(kinds.MOVED, memory.weights, False)
        self._versions.step(it.version)
        yield from self._of_versions(alive, at_end=False)
        yield self._gradients_are(0, at_end=True)

    def make_state(self) -> Iterator[Change]:
        """Add the optimizer's state, which its first step makes."""
        if not self._has_state:
            self._has_state = True
            yield Change(kinds.STATE, self._memory.state, False)

    def _by_kind(self) -> dict[str, int]:
        """Return the bytes held between two instructions, by kind."""
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
