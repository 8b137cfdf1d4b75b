"""The server of asynchronous data parallelism: it applies every gradient as it comes, and hands out the newest weights.

It is no copy of the model. It stands beside the stage's first replica and updates that one's weights, which keep the
version that the replica computes with as any other that is in flight: checkpoints, evaluations and counts of memory
find everything where they do in other modes. It knows no clock; who calls it says in which order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from pipebench.checkpoint.state import CheckpointError
from pipebench.engine.protocols import Collectives, EngineExtension, Transport, WorkerExtension
from pipebench.engine.replica import Replica
from pipebench.engine.setup import Setup
from pipebench.engine.worker import Worker
from pipebench.extensions.asynchronous.pushes import Pushes
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.syncs import ASYNCHRONOUS
from pipebench.typed_json import JsonError, read


class Pulled(NamedTuple):
    """Weights that a replica takes over.

    Attributes:
        number: of the version.
        parameters: in the stage's order; None for the replica that the server stands beside, which has them.
    """

    number: int
    parameters: Sequence[torch.Tensor] | None


class Servers(EngineExtension):
    """The servers of workers' stages. These are nobody's: of a worker that is alone, on copies of its stages.

    Attributes:
        here: those of this process, by stage.
    """

    here: Mapping[int, "ParameterServer"]

    def push(
        self, stage: int, replica: int, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Give the server of a stage a minibatch's gradient, computed with a version of the weights.

        Raises:
            PeerLostError: the server's process is gone; or, where it is this one, a replica's.
        """

    def pull(self, stage: int, replica: int, at_least: int) -> Pulled:
        """Return the weights that the replica's last push has made; or, where it is told, those of so many pushes.

        Raises:
            PeerLostError: as above.
        """
        return Pulled(0, None)

    def facts(self) -> list[Any]:
        """Return what was pushed so far."""
        return [asdict(pushes) for server in self.here.values() for pushes in server.segments]

    def restore(self, facts: list[Any]) -> None:
        """Go on from what `facts` returned.

        Raises:
            CheckpointError: it isn't what it returns.
        """
        try:
            segments = read(list[Pushes], json.dumps(facts), "progress.facts.pushes")
        except JsonError as error:
            raise CheckpointError(str(error)) from None
        for server in self.here.values():
            server.segments = segments


class PushAndPull(WorkerExtension):
    """How a worker pushes and pulls.

    Args:
        worker: the worker.

    Attributes:
        handlers: how pushes and pulls are executed.
        servers: of its stages.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.servers = Servers()
        self.handlers = {Op.PUSH: self._push, Op.PULL: self._pull}

    def begin(self) -> None:
        """Start a segment of training with the weights that the drain has left."""
        worker = self._worker
        worker.held_versions = {stage: replica.weights.hold() for stage, replica in worker.replicas.items()}

    def _push(self, it: Instruction, _: Transport, __: Collectives) -> None:
        worker = self._worker
        replica = worker.replicas[it.stage]
        gradients = worker.updates.clipped(replica.gradients)
        self.servers.push(it.stage, worker.replica_index, it.number, worker.held_versions[it.stage], gradients)
        replica.gradients = [None] * len(gradients)
        worker.note_memory()

    def _pull(self, it: Instruction, _: Transport, __: Collectives) -> None:
        worker = self._worker
        number, parameters = self.servers.pull(it.stage, worker.replica_index, it.version)
        if parameters is not None:
            worker.replicas[it.stage].weights.take(number, parameters)
        worker.held_versions[it.stage] = number


def connect(worker: Worker, servers: Servers) -> None:
    """Let a worker push to servers, and pull from them."""
    extension = worker.extensions[ASYNCHRONOUS]
    assert isinstance(extension, PushAndPull)
    extension.servers = servers


class ParameterServer:
    """The server of one stage.

    Args:
        setup: what is run.
        stage: the stage.
        replica: its first replica.

    Attributes:
        segments: what was pushed, drain by drain.
    """

    def __init__(self, setup: Setup, stage: int, replica: Replica) -> None:
        self.segments: list[Pushes] = []
        self._setup = setup
        self._stage = stage
        self._replica = replica
        self._drained = 0
        self._samples = 0

    def begin(self, first: int) -> None:
        """Start a segment of training that begins with this minibatch of the run."""
        self.segments.append(Pushes(first))
        self._drained = self._replica.weights.newest.number
        self._samples = self._setup.sampler.samples_before(first)

    @property
    def applied(self) -> int:
        """Pushes applied in the segment."""
        return len(self.segments[-1].minibatches)

    def apply(self, replica: int, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None]) -> Pulled:
        """Make an update of one minibatch's gradient; return the weights it has made, which the replica pulls next.

        The learning rate goes by the samples of the updates made before, whichever these were.

        Args:
            replica: whose minibatch it was.
            minibatch: numbered since the drain.
            version: number of the weights it was computed with.
            gradients: of the mean loss, one per parameter.
        """
        pushes, weights = self.segments[-1], self._replica.weights
        own = self._setup.sampler.size(pushes.first + minibatch)
        lr = self._setup.lr(self._stage, self._samples, own)
        weights.update(weights.as_stepped(gradients), lr, keep_from=weights.newest.number + 1)
        self._samples += own
        pushes.add(minibatch, version - self._drained)
        return self.newest(replica)

    @property
    def averages(self) -> Sequence[torch.Tensor] | None:
        """What evaluations see in place of the newest weights, where the optimizer keeps averages; at a drain."""
        weights = self._replica.weights
        return None if weights.evaluated is weights.newest else weights.evaluated.parameters

    def newest(self, replica: int) -> Pulled:
        """Return the newest weights for a replica: a copy, but for the first, which holds the version itself."""
        weights = self._replica.weights
        if replica == 0:
            return Pulled(weights.hold(), None)
        return Pulled(weights.newest.number, [parameter.detach().clone() for parameter in weights.newest.parameters])
