"""Predicted memory of asynchronous replicas and their server.

As in the engine, the server has no copy of the model. It updates the first replica's weights, which stash the version
that this replica is computing with. Gradients and weights in transit count at both ends.
"""

from collections.abc import Iterator, Sequence

from pipebench.model.sampling import Size
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.syncs import SYNCS
from pipebench.simulate.kinds import RECEIVED, SENT
from pipebench.simulate.memory import StageMemoryCosts
from pipebench.simulate.memory_meter import MemoryExtension, WorkerChange
from pipebench.simulate.replica_memory import Change, ReplicaMemory
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import Transfer


class PushingMemory(ReplicaMemory):
    """The memory of a replica, whose push frees its gradients."""

    def changes(self, it: Instruction, size: Size) -> Iterator[Change]:
        """Yield the changes of an instruction, in order."""
        if it.op is Op.PUSH:
            yield self._gradients_are(0, at_end=True)
        else:
            yield from super().changes(it, size)


class LaterReplicaMemory(PushingMemory):
    """The memory of any replica but the first."""

    def make_state(self) -> Iterator[Change]:
        """Yield nothing: the server has the optimizer."""
        yield from ()


class FirstReplicaMemory(PushingMemory):
    """The memory of the first replica, whose weights the server updates."""

    def drained(self) -> Iterator[Change]:
        """Start a segment with the newest version."""
        yield from super().drained()
        self._versions.hold()

    def changes(self, it: Instruction, size: Size) -> Iterator[Change]:
        """Yield the changes of an instruction; `applied` has those of pulls within a segment."""
        if it.op is Op.PULL and it.version >= 0:
            alive = len(self._versions.alive)
            self._versions.hold()
            yield from self._of_versions(alive, at_end=True)
        else:
            if it.op is Op.PUSH:
                yield from self.make_state()  # before the gradient is freed
            yield from super().changes(it, size)

    def applied(self, *, own: bool) -> Iterator[Change]:
        """Yield the changes of an update; `own`: with this replica's gradient, so that it gets the new version, too."""
        alive = len(self._versions.alive)
        yield from self.make_state()
        self._versions.step(self._versions.newest + 1)
        if own:
            self._versions.hold()
        yield from self._of_versions(alive, at_end=True)


class ServerMemory(MemoryExtension):
    """The server's part in workers' memory. There is one stage; worker i is its replica i."""

    def __init__(self, pipeline: Pipeline, memories: Sequence[StageMemoryCosts]) -> None:
        (self._memory,) = memories
        self._kind = SYNCS[pipeline.sync].algorithm
        self._first = FirstReplicaMemory(self._memory)

    def replica(self, worker: int, stage: int) -> PushingMemory:
        """Return the memory of a worker's stage."""
        return LaterReplicaMemory(self._memory) if worker > 0 else self._first

    def event(self, event: TimelineEvent) -> Iterator[WorkerChange]:
        """Yield the changes at the end of a push or pull."""
        _, end_s, worker, it, _ = event
        if worker > 0 and it.op in (Op.PUSH, Op.PULL):  # the receiver frees the gradient or the weights
            yield end_s, 0 if it.op is Op.PUSH else worker, RECEIVED, -self._memory.weights, it
        for kind, num_bytes, _ in self._first.applied(own=worker == 0) if it.op is Op.PUSH else ():
            if num_bytes:
                yield end_s, 0, kind, num_bytes, it

    def transfer(self, transfer: Transfer) -> Iterator[WorkerChange]:
        """Yield the changes by a gradient or weights in transit."""
        if transfer.kind != self._kind:
            return
        (receiver,), num_bytes = transfer.receivers, transfer.num_bytes
        if receiver > 0:  # pulled weights, a copy
            yield transfer.start_s, 0, SENT, num_bytes, transfer
            yield transfer.end_s, 0, SENT, -num_bytes, transfer
        yield transfer.start_s, receiver, RECEIVED, num_bytes, transfer
