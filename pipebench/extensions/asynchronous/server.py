"""The server of asynchronous data parallelism: applies every gradient as it arrives, and returns the newest weights.

It has no copy of the model. It updates the first replica's weights, which keep the version that the replica computes
with like any other in flight: checkpoints, evaluations and memory counts need no special case. It knows no clock; the
order of calls is the order of updates. The model is one stage.
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

    number: int  # of the version
    parameters: Sequence[torch.Tensor] | None  # in the stage's order; None for the first replica, which has them


class ParameterServer:
    """Applies pushes to the weights of the first replica."""

    def __init__(self, setup: Setup, weights: Weights) -> None:
        self.earlier: list[PackedPushes] = []  # from drain to drain
        self.current: Pushes | None = None  # since the last drain
        self._setup = setup
        self._weights = weights
        self._drained = 0
        self._samples = 0

    def begin(self, first: int) -> None:
        """Start a segment of training at minibatch `first` of the run."""
        self.earlier, self.current = self.segments(), Pushes(first)
        self._drained = self._weights.newest.number
        self._samples = self._setup.sampler.samples_before(first)

    @property
    def applied(self) -> int:
        """Pushes applied in the segment."""
        return 0 if self.current is None else len(self.current.minibatches)

    def segments(self) -> list[PackedPushes]:
        """Return all pushes so far."""
        return [*self.earlier, *([] if self.current is None else [PackedPushes.of(self.current)])]

    def apply(self, minibatch: int, version: int, gradients: Gradients, *, of_first: bool) -> Pulled:
        """Update with a minibatch's gradient of the mean loss; return the new weights, which the replica pulls next.

        `minibatch` is numbered since the drain; `version` is of the weights that computed the gradient; `of_first`:
        whether the replica is the first. The learning rate depends on the samples of all earlier updates.
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
        """The optimizer's averages for evaluations, if it keeps any; at a drain."""
        weights = self._weights
        return None if weights.evaluated is weights.newest else weights.evaluated.parameters

    def newest(self, *, for_first: bool) -> Pulled:
        """Return the newest weights for a replica: a copy, but for the first, which holds the version itself."""
        weights = self._weights
        if for_first:
            return Pulled(weights.hold(), None)
        return Pulled(weights.newest.number, [parameter.detach().clone() for parameter in weights.newest.parameters])


class Server(EngineExtension):
    """The server's interface for workers; this one serves a worker alone, on copies of its stage."""

    here: ParameterServer | None = None  # if in this process

    def push(self, replica: int, minibatch: int, version: int, gradients: Gradients) -> None:
        """Push a minibatch's gradient, computed with a version of the weights."""

    def pull(self, replica: int, at_least: int) -> Pulled:
        """Return the weights after the replica's last push or, if `at_least` is given, after so many pushes."""
        return Pulled(0, None)

    def facts(self) -> list[Any]:
        """Return all pushes so far."""
        segments = [] if self.here is None else self.here.segments()
        return [{"first": each.first, "packed": each.packed} for each in segments]

    def restore(self, facts: list[Any]) -> None:
        """Restore the result of `facts`; raises a CheckpointError if it has another form."""
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
    """A worker's pushes and pulls."""

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
    """Connect a worker to a server; return the worker's weights."""
    extension = worker.extensions[ASYNCHRONOUS]
    assert isinstance(extension, PushAndPull)
    extension.server = server
    (replica,) = worker.replicas.values()
    return replica.weights


class InProcessServer(Server):
    """The server in the process of all workers; the virtual clock guarantees arrival and order."""

    here: ParameterServer

    def __init__(self, collectives: InProcessCollectives) -> None:
        self._collectives = collectives
        self._kind = SYNCS[collectives.setup.pipeline.sync].way
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
        """Return the weights after the replica's last push, or after all."""
        if replica > 0:
            self._collectives.count(self._kind, 0, replica, self._num_bytes)
        own = self._pulled.pop(replica, None)
        return own if at_least < 0 and own is not None else self.here.newest(for_first=replica == 0)

    def drained(self) -> Iterator[Sent]:
        """Set the optimizer's averages, if any, for evaluations; yield their messages."""
        averages = self.here.averages
        for worker, weights in enumerate(self._weights[1:] if averages is not None else (), 1):
            assert averages is not None
            weights.take_averages(averages)
            yield BUFFERS, 0, worker, sum(average.nbytes for average in averages), "averages"
