"""Memory of an asynchronous server: versions beside the first replica, and gradients and weights in transit.

As in the engine, the server has no copy of the model: it updates the first replica's weights, which keep the version
that the replica computes with.
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
    """A replica whose gradients are freed by its push."""

    def changes(self, it: Instruction, size: Size) -> Iterator[Change]:
        """Yield what an instruction changes, in order."""
        if it.op is Op.PUSH:
            yield self._gradients_are(0, at_end=True)
        else:
            yield from super().changes(it, size)


class LaterReplicaMemory(PushingMemory):
    """A replica without the server beside it."""

    def make_state(self) -> Iterator[Change]:
        """Yield nothing: the optimizer is the server's."""
        yield from ()


class FirstReplicaMemory(PushingMemory):
    """The first replica, whose weights the server updates."""

    def drained(self) -> Iterator[Change]:
        """Begin a segment with the newest version."""
        yield from super().drained()
        self._versions.hold()

    def changes(self, it: Instruction, size: Size) -> Iterator[Change]:
        """Yield what an instruction changes; pulls within a segment are part of `applied`."""
        if it.op is Op.PULL and it.version >= 0:
            alive = len(self._versions.alive)
            self._versions.hold()
            yield from self._of_versions(alive, at_end=True)
        else:
            yield from self.make_state() if it.op is Op.PUSH else ()  # before its gradient goes
            yield from super().changes(it, size)

    def applied(self, *, own: bool) -> Iterator[Change]:
        """Yield the changes of an update with the replica's own gradient or another's."""
        alive = len(self._versions.alive)
        yield from self.make_state()
        self._versions.step(self._versions.newest + 1)
        if own:
            self._versions.hold()
        yield from self._of_versions(alive, at_end=True)


class ServerMemory(MemoryExtension):
    """The server's part in workers' memory; workers are numbered like replicas, `memories` are of the single stage."""

    def __init__(self, pipeline: Pipeline, memories: Sequence[StageMemoryCosts]) -> None:
        (self._memory,), self._kind = memories, SYNCS[pipeline.sync].way
        self._first = FirstReplicaMemory(self._memory)

    def replica(self, worker: int, stage: int) -> PushingMemory:
        """Return the memory of a worker's stage."""
        return LaterReplicaMemory(self._memory) if worker > 0 else self._first

    def event(self, event: TimelineEvent) -> Iterator[WorkerChange]:
        """Yield the changes at the end of a push or pull."""
        _, end_s, worker, it, _ = event
        if worker > 0 and it.op in (Op.PUSH, Op.PULL):  # frees the received gradient or weights
            yield end_s, 0 if it.op is Op.PUSH else worker, RECEIVED, -self._memory.weights, it
        for kind, num_bytes, _ in self._first.applied(own=worker == 0) if it.op is Op.PUSH else ():
            if num_bytes:
                yield end_s, 0, kind, num_bytes, it

    def transfer(self, transfer: Transfer) -> Iterator[WorkerChange]:
        """Yield the changes by gradients or weights in transit."""
        if transfer.kind != self._kind:
            return
        (receiver,), num_bytes = transfer.receivers, transfer.num_bytes
        if receiver > 0:  # pulled weights, a copy
            yield transfer.start_s, 0, SENT, num_bytes, transfer
            yield transfer.end_s, 0, SENT, -num_bytes, transfer
        yield transfer.start_s, receiver, RECEIVED, num_bytes, transfer
