"""The server of asynchronous data parallelism: applies every gradient as it arrives, and returns the newest weights.

The server has no copy of the model. It updates the first replica's weights, which stash the version that this replica
is computing with, as they do for minibatches in flight. So checkpoints, evaluations and memory counts need no special
case. The server knows no clock: the order of calls is the order of updates. The model is one stage.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from pipebench.checkpoint.state import CheckpointError
from pipebench.engine.collectives import InProcessCollectives
from pipebench.engine.protocols import Collectives, EngineExtension, Sent, Transport, WorkerExtension
from pipebench.engine.setup import Setup
from pipebench.engine.weights import Weights
from pipebench.engine.worker import Worker
from pipebench.extensions.asynchronous.pushes import PackedPushes, Pushes
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.syncs import ASYNCHRONOUS, SYNCS
from pipebench.simulate.simulation import RunPart
from pipebench.simulate.timeline import BUFFERS
from pipebench.typed_json import JsonError, read

Gradients = Sequence[torch.Tensor | None]


class Pulled(NamedTuple):
    """Weights for a replica."""

    number: int  # version: updates since the start of the run
    parameters: Sequence[torch.Tensor] | None  # in the stage's order; None for the first replica, which has them


class ParameterServer:
    """Applies pushes to the weights of the first replica."""

    def __init__(self, setup: Setup, weights: Weights) -> None:
        self.earlier: list[PackedPushes] = []  # one per segment before the last drain
        self.current: Pushes | None = None  # since the last drain
        self._setup = setup
        self._weights = weights
        self._drained = 0  # version at the last drain
        self._samples = 0  # of all updates so far

    def begin(self, first: int) -> None:
        """Start a segment of training at minibatch `first` of the run."""
        self.earlier, self.current = self.segments(), Pushes(first)
        self._drained = self._weights.newest.number
        self._samples = self._setup.sampler.samples_before(first)

    @property
    def applied(self) -> int:
        """Number of pushes applied in the segment."""
        return 0 if self.current is None else len(self.current.minibatches)

    def segments(self) -> list[PackedPushes]:
        """Return the pushes of all segments so far."""
        return [*self.earlier, *([] if self.current is None else [PackedPushes.of(self.current)])]

    def apply(self, minibatch: int, version: int, gradients: Gradients, *, of_first: bool) -> Pulled:
        """Update with a replica's gradient; return the new weights, which the replica pulls next.

        The learning rate is that after the samples of all earlier updates.

        Args:
            minibatch: counted from the last drain.
            version: the weights' version that the gradient was computed with.
            gradients: of the mean loss, in the stage's order of parameters.
            of_first: whether the replica is the first.
        """
        pushes, weights = self.current, self._weights
        assert pushes is not None
        own = self._setup.sampler.size(pushes.first + minibatch)
        lr = self._setup.lr(0, self._samples, own)
        weights.update(weights.as_stepped(gradients), lr, keep_from=weights.newest.number + 1)
        self._samples += own
        pushes.add(minibatch, version - self._drained)
        return self.newest(for_first=of_first)

    @property
    def averages(self) -> Sequence[torch.Tensor] | None:
        """The averages of parameters that the optimizer keeps for evaluations, if any; at a drain."""
        weights = self._weights
        return None if weights.evaluated is weights.newest else weights.evaluated.parameters

    def newest(self, *, for_first: bool) -> Pulled:
        """Return the newest weights: a copy, or for the first replica the version itself, which it then holds."""
        weights = self._weights
        if for_first:
            return Pulled(weights.hold(), None)
        return Pulled(weights.newest.number, [parameter.detach().clone() for parameter in weights.newest.parameters])


class Server(EngineExtension):
    """The interface of servers for workers.

    This class itself serves a worker that runs alone on copies of its stage, as in a warm-up: it ignores pushes.
    """

    here: ParameterServer | None = None  # the server itself, if it is in this process

    def push(self, replica: int, minibatch: int, version: int, gradients: Gradients) -> None:
        """Push a minibatch's gradient, computed with a version of the weights."""

    def pull(self, replica: int, at_least: int) -> Pulled:
        """Return the newest weights once the replica's last push or, if `at_least` >= 0, so many pushes are applied."""
        return Pulled(0, None)

    def facts(self) -> list[Any]:
        """Return the pushes of all segments so far, as JSON values."""
        segments = [] if self.here is None else self.here.segments()
        return [{"first": each.first, "packed": each.packed} for each in segments]

    def restore(self, facts: list[Any]) -> None:
        """Restore what `facts` has returned.

        Raises:
            CheckpointError: it has another form.
        """
        try:
            given = read(list[PackedPushes], json.dumps(facts), "progress.facts.pushes")
            segments = [PackedPushes.of(each.unpacked()) for each in given]
        except JsonError as error:
            raise CheckpointError(str(error)) from None
        except ValueError as error:
            raise CheckpointError(f"progress.facts.pushes: {error}") from None
        if self.here is not None:
            self.here.earlier = segments


class PushAndPull(WorkerExtension):
    """Executes a worker's pushes and pulls."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        (self._replica,) = worker.replicas.values()
        self.server = Server()
        self.handlers = {Op.PUSH: self._push, Op.PULL: self._pull}

    def begin(self, segment: Any) -> None:
        """Start a segment of training with the weights after the drain."""
        self._worker.held_version = self._replica.weights.hold()

    def _push(self, it: Instruction, _: Transport, __: Collectives) -> None:
        worker, replica = self._worker, self._replica
        worker.updates.clip(replica.gradients)
        self.server.push(worker.replica_index[it.stage], it.number, worker.held_version, replica.gradients)
        replica.gradients = [None] * len(replica.gradients)
        worker.measure_memory()

    def _pull(self, it: Instruction, _: Transport, __: Collectives) -> None:
        number, parameters = self.server.pull(self._worker.replica_index[it.stage], it.version)
        if parameters is not None:
            self._replica.weights.take(number, parameters)
        self._worker.held_version = number


def connect(worker: Worker, server: Server) -> Weights:
    """Connect a worker to a server; return the weights of the worker's replica."""
    extension = worker.extensions[ASYNCHRONOUS]
    assert isinstance(extension, PushAndPull)
    extension.server = server
    (replica,) = worker.replicas.values()
    return replica.weights


class InProcessServer(Server):
    """The server of workers that share its process.

    Workers push and pull in the order of the virtual clock, so a push has always arrived when it is needed.
    """

    here: ParameterServer

    def __init__(self, collectives: InProcessCollectives) -> None:
        self._collectives = collectives
        self._kind = SYNCS[collectives.setup.pipeline.sync].algorithm
        self._weights = [connect(worker, self) for worker in collectives.workers]
        self._num_bytes = sum(parameter.nbytes for parameter in self._weights[0].newest.parameters)
        self.here = ParameterServer(collectives.setup, self._weights[0])
        self._pulled: dict[int, Pulled] = {}  # by replica

    def begin(self, part: RunPart) -> None:
        """Start a segment of training."""
        self._pulled.clear()
        self.here.begin(part.first)

    def push(self, replica: int, minibatch: int, version: int, gradients: Gradients) -> None:
        """Apply a gradient."""
        self._pulled[replica] = self.here.apply(minibatch, version, gradients, of_first=replica == 0)
        if replica > 0:
            self._collectives.count(self._kind, replica, 0, self._num_bytes)
            workers = self._collectives.workers
            workers[0].measure_memory_beside(workers[replica].busy_until_s)

    def pull(self, replica: int, at_least: int) -> Pulled:
        """Return the weights after the replica's last push or, if `at_least` >= 0, after all pushes."""
        if replica > 0:
            self._collectives.count(self._kind, 0, replica, self._num_bytes)
        own = self._pulled.pop(replica, None)
        return own if at_least < 0 and own is not None else self.here.newest(for_first=replica == 0)

    def drained(self) -> Iterator[Sent]:
        """Give all replicas the optimizer's averages, if any, for evaluations; yield the messages."""
        averages = self.here.averages
        if averages is None:
            return
        for worker, weights in enumerate(self._weights[1:], 1):
            weights.take_averages(averages)
            yield BUFFERS, 0, worker, sum(average.nbytes for average in averages), "averages"
