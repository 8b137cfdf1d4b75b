"""Warm-up: a unit of every size through every stage before the clock starts, on copies that are discarded.

The first forward, backward and update of a stage load the GPU's code, choose algorithms and allocate memory. So do the
first ones with every other number of samples, as in an epoch's last minibatch or uneven microbatches. CUDA may delay
them until all running work on the device has ended, which would deadlock with an NCCL kernel that waits for a peer. So
they happen once while nothing is in transfer between GPUs: values go from stage to stage by Gloo, and a copy of every
stage computes.

Only GPUs need it, but it runs on any device; tests check on a CPU that it leaves no traces. Weights, optimizer, running
statistics and carried states are copies; random generators are restored.

Stages to compile (`engine.compile`) are compiled here, too, on any device. The worker's own stages then run a forward
and a backward of every size, and what that changes in them is restored.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from pipebench.distributed.channel import ChannelLink, ChannelSender, Receiver
from pipebench.distributed.world import World
from pipebench.engine.feed import Feed
from pipebench.engine.in_situ import AloneCollectives, zero_gradients
from pipebench.engine.replica import Replica
from pipebench.engine.scores import Scores
from pipebench.engine.setup import Setup, ranks_of
from pipebench.engine.worker import Worker
from pipebench.model.allocator import free_cycles
from pipebench.model.sampling import Sampler, microbatch_sizes
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import GRADIENT, Op
from pipebench.schedule.programs import forward_programs, programs

_TAG = 6  # of its messages, on the group of all processes; channels have their own groups
_TAGS_OF_EDGE = 2
_NO_LOSS = float("nan")


def needs_warm_up(setup: Setup) -> bool:
    """Return whether a run needs warm-up: on GPUs, and to compile."""
    return setup.device.type == "cuda" or setup.compiled


def warm_up(setup: Setup, world: World, own: Worker) -> None:
    """Run units of every size, of training and evaluations, through copies of this worker's stages.

    All processes call it. All replicas of a stage run the same units.

    Args:
        setup: what to run; its graph still has the model.
        world: the processes.
        own: this process's worker.
    """
    on_gpu = setup.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(setup.device)
    alone = _alone(setup)
    with torch.random.fork_rng([setup.device] if on_gpu else [], device_type="cuda"):
        # The copies, their gradients and optimizer states, and the worker's own weights together would take more memory
        # than training does. So the latter are set aside.
        with ExitStack() as set_aside:
            for replica in own.replicas.values():
                set_aside.enter_context(replica.weights.set_aside())
            worker = Worker(alone, setup.pipeline.stages_of(own.index)[0])
            for number, each in enumerate(_of_every_size(alone)):
                _train(alone, worker, _Neighbours(setup, world, own.index), *each, updates=number == 0)
            for minibatch in _first_of_size(setup.held_out):
                _evaluate(alone, worker, _Neighbours(setup, world, own.index), minibatch)
            if on_gpu:
                torch.cuda.synchronize(setup.device)
            del worker
            free_cycles(setup.device)
        if setup.compiled:
            _compile(setup, world, own)


def _alone(setup: Setup) -> Setup:
    """Return a setup with one replica of every stage, its workers numbered by position."""
    once = (1,) * setup.pipeline.num_stages
    evaluation = replace(setup.evaluation, pipeline=replace(setup.evaluation.pipeline, replicas=once))
    pipeline = replace(setup.pipeline, replicas=once, shares_norm=False)
    return replace(setup, pipeline=pipeline, evaluation=evaluation, compiled=False)


def _first_of_size(sampler: Sampler) -> list[int]:
    """Return the first minibatch of every size that needs no carried state; minibatch 0 comes first."""
    beginning = (k for k in reversed(range(sampler.minibatches_per_epoch)) if sampler.stream(k).starts)
    return sorted({sampler.size(k): k for k in beginning}.values())


def _of_every_size(setup: Setup) -> Iterator[tuple[int, int]]:
    """Yield a unit of every number of samples: its minibatch, and its number in a segment that begins with it."""
    known = {0}
    for minibatch in _first_of_size(setup.sampler):
        sizes = microbatch_sizes(setup.sampler.size(minibatch), setup.pipeline.microbatches)
        for unit, size in zip(setup.pipeline.units(0), sizes, strict=True):
            if size not in known:
                yield minibatch, unit
            known.add(size)


def _compile(setup: Setup, world: World, own: Worker) -> None:
    """Compile a worker's own stages: run a unit of every size through them, without an update."""
    alone = _alone(setup)
    worker = Worker(alone, setup.pipeline.stages_of(own.index)[0])
    worker.replicas = own.replicas
    worker.running.clear()  # in place, since its peaks have the same dictionary: the replicas it was made with go
    worker.running.update(own.running)
    for each in _of_every_size(alone):
        with ExitStack() as stack:
            for replica in own.replicas.values():
                stack.enter_context(_without_traces(replica))
            _train(alone, worker, _Neighbours(setup, world, own.index), *each, updates=False)
    if setup.device.type == "cuda":
        torch.cuda.synchronize(setup.device)
    del alone, worker
    free_cycles(setup.device)


@contextmanager
def _without_traces(replica: Replica) -> Iterator[None]:
    """Allocate memory for a replica's weights, with any values; afterwards drop gradients and restore statistics."""
    before = [buffer.clone() for buffer in replica.module.buffers()]
    replica.weights.allocate()
    yield
    replica.weights.free()
    replica.gradients = [None] * len(replica.gradients)
    replica.states.clear()
    with torch.no_grad():
        for buffer, value in zip(replica.module.buffers(), before, strict=True):
            buffer.copy_(value)


class _Neighbours:
    """A transport to the workers of neighbouring stages. It sends no gradients: a stage gets zeros.

    The replicas of a stage send to disjoint sets of another stage's replicas.
    """

    def __init__(self, setup: Setup, world: World, index: int) -> None:
        self._setup, self._world = setup, world
        self._index = index
        self._ranks = ranks_of(setup)
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self._senders: dict[tuple[int, int], list[ChannelSender]] = {}
        self._sent: dict[tuple[int, int], Any] = {}

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Send a stage's values; gradients are dropped."""
        if kind == GRADIENT:
            return
        edge, replicas = (source, target), self._setup.pipeline.replicas
        own = self._setup.pipeline.replica_of(self._index, source)
        others = range(own, replicas[target], replicas[source])
        senders = self._senders.setdefault(
            edge, [ChannelSender(self._link(edge, target, other), 0) for other in others]
        )
        for sender in senders:
            sender.send(unit, values, _NO_LOSS)
        self._sent[edge] = values

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return a stage's input values, or zeros as gradients of the values that it sent."""
        if kind == GRADIENT:
            return zero_gradients(self._sent[target, source])
        edge = (source, target)
        if edge not in self._receivers:
            own = self._setup.pipeline.replica_of(self._index, target)
            self._receivers[edge] = Receiver(self._link(edge, source, own), 0)
        self._receivers[edge].expect(1)
        return self._receivers[edge].receive(unit).values

    def copied(self, kind: str, num_bytes: int) -> None:
        """Ignore a copy."""

    def flush(self) -> None:
        """Wait until every message has left."""
        for senders in self._senders.values():
            for sender in senders:
                sender.flush()

    def _link(self, edge: tuple[int, int], stage: int, replica: int) -> ChannelLink:
        # Not in pinned memory, because torch never releases that.
        pipeline = self._setup.pipeline
        tag = _TAG + _TAGS_OF_EDGE * (edge[0] * pipeline.num_stages + edge[1])
        peer = self._world.process(self._ranks[pipeline.worker(stage, replica)])
        return ChannelLink(peer, [None], tag, None, self._setup.device, lambda: 0.0, pins=False)


def _train(setup: Setup, worker: Worker, neighbours: _Neighbours, minibatch: int, unit: int, *, updates: bool) -> None:
    feed = Feed(setup, "train", minibatch, 1)
    program = programs(setup.pipeline, 1)[worker.index]
    try:
        worker.begin_training(feed, minibatch, 1)
        _play((it for it in program if (updates if it.op is Op.UPDATE else it.number == unit)), worker, neighbours)
    finally:
        feed.close()


def _evaluate(setup: Setup, worker: Worker, neighbours: _Neighbours, minibatch: int) -> None:
    feed = Feed(setup, "eval", minibatch, 1)
    try:
        worker.begin_evaluation(feed, Scores(setup.dataset))
        _play(forward_programs(setup.evaluation.pipeline, 1)[worker.index], worker, neighbours)
    finally:
        feed.close()


def _play(program: Iterable[Instruction], worker: Worker, neighbours: _Neighbours) -> None:
    alone = AloneCollectives()
    alone.worker = worker
    for instruction in program:
        worker.execute(instruction, neighbours, alone)
    neighbours.flush()
