"""What workers hold of a server's: versions that it makes beside the first replica, gradients and weights on their way.

As in the engine the server is no copy of the model: it steps the first replica's weights, which keep the version that
the replica computes with.
"""

from collections.abc import Iterator, Sequence

from pipebench.model.sampling import Size
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.syncs import SYNCS
from pipebench.simulate.memory import RECEIVED, SENT, StageMemoryCosts
from pipebench.simulate.memory_meter import MemoryExtension, WorkerChange
from pipebench.simulate.replica_memory import Change, ReplicaMemory
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import Transfer


class PushingMemory(ReplicaMemory):
    """A replica whose gradients are gone once it has pushed them."""

    def changes(self, it: Instruction, size: Size) -> Iterator[Change]:
        """Yield what an instruction changes, in order."""
        if it.op is Op.PUSH:
            yield self._gradients_are(0, at_end=True)
        else:
            yield from super().changes(it, size)


class ServerMemory(PushingMemory):
    """The first replica, whose weights a server steps as gradients come."""

    def drained(self) -> Iterator[Change]:
        """Begin a segment with the newest version."""
        yield from super().drained()
        self._versions.hold()

    def changes(self, it: Instruction, size: Size) -> Iterator[Change]:
        """Yield what an instruction changes; what a pull in between hands out, `applied` has told of."""
        if it.op is Op.PULL and it.version >= 0:
            alive = len(self._versions.alive)
            self._versions.hold()
            yield from self._of_versions(alive, at_end=True)
        else:
            yield from super().changes(it, size)

    def applied(self, *, own: bool) -> Iterator[Change]:
        """The server has applied a gradient, the replica's own or another's."""
        alive = len(self._versions.alive)
        yield from self._stepped()
        self._versions.step(self._versions.newest + 1)
        if own:
            self._versions.hold()
        yield from self._of_versions(alive, at_end=True)


class ServerMemories(MemoryExtension):
    """The servers of all stages.

    Args:
        pipeline: their replicas.
        memories: what these keep, by stage.
    """

    def __init__(self, pipeline: Pipeline, memories: Sequence[StageMemoryCosts]) -> None:
        self._pipeline, self._memories = pipeline, memories
        self._servers = [ServerMemory(memory) for memory in memories]

    def replica(self, worker: int, stage: int) -> PushingMemory:
        """Return what a worker holds of a stage."""
        is_first = worker == self._pipeline.first_workers[stage]
        return self._servers[stage] if is_first else PushingMemory(self._memories[stage])

    def event(self, event: TimelineEvent) -> Iterator[WorkerChange]:
        """Yield what a push or a pull changes when it is over."""
        _, end_s, worker, it, _ = event
        if it.op not in (Op.PUSH, Op.PULL):
            return
        host, travelled = self._pipeline.first_workers[it.stage], self._memories[it.stage].weights
        if worker != host:  # a gradient has come to the host, or weights from there
            yield end_s, host if it.op is Op.PUSH else worker, RECEIVED, -travelled, it
        for kind, num_bytes, _ in self._servers[it.stage].applied(own=worker == host) if it.op is Op.PUSH else ():
            if num_bytes:
                yield end_s, host, kind, num_bytes, it

    def transfer(self, transfer: Transfer) -> Iterator[WorkerChange]:
        """Yield what a gradient or weights on their way change."""
        if transfer.kind != SYNCS[self._pipeline.sync].kind:
            return
        (sender,), (receiver,), num_bytes = transfer.senders, transfer.receivers, transfer.num_bytes
        if receiver not in self._pipeline.first_workers:  # weights that it pulls, which are a copy
            yield transfer.start_s, sender, SENT, num_bytes, transfer
            yield transfer.end_s, sender, SENT, -num_bytes, transfer
        yield transfer.start_s, receiver, RECEIVED, num_bytes, transfer
