"""Warm-up: one minibatch through every stage before the clock, on copies that are thrown away.

The first forward, backward and update of a stage load the GPU's code, choose algorithms and ask for memory. CUDA may
let such a thing wait until everything that runs on the device has ended; with a kernel of NCCL among it, waiting for a
peer which waits for us, it never would. So all of it happens once while nothing is on its way between GPUs: values go
from stage to stage by Gloo, a copy of every stage computes, and the run finds everything as it would have without.

Only GPUs have a use for it; it computes anywhere, and the tests look for its traces on a CPU.

Everything is a copy (weights, optimizer, running statistics, carried states) or is put back (random generators).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from pipebench.distributed.channel import ChannelLink, ChannelSender, Receiver
from pipebench.distributed.world import World
from pipebench.engine.feed import Feed, training_feed
from pipebench.engine.scores import Scores
from pipebench.engine.setup import Setup, ranks_of
from pipebench.engine.worker import Worker
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import GRADIENT, Op
from pipebench.schedule.programs import forward_programs, programs

_TAG = 6  # of its messages, on the group of all processes; those of the channels have groups of their own
_TAGS_OF_EDGE = 2
_UNIT = 0
_NOTHING = float("nan")
_CPU = torch.device("cpu")


def gains_by_warm_up(device: torch.device) -> bool:
    """Say whether first times matter: on a CPU nothing waits for a device."""
    return device.type == "cuda"


def warm_up(setup: Setup, world: World, index: int) -> None:
    """Run the run's first unit, and an evaluation's, through copies of this worker's stages; all processes call it.

    Every stage has one replica here, which all its workers play: unit 0 is everybody's.

    Args:
        setup: what is run; its graph still holds the model.
        world: the processes.
        index: which worker this process is.

    Raises:
        PeerLostError: a worker is gone.
    """
    on_gpu = setup.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(setup.device)
    alone = _alone(setup)
    with _kept_random_state(setup.device):
        worker = Worker(alone, setup.pipeline.stages_of(index)[0])
        _train(alone, worker, _Neighbours(setup, index))
        _evaluate(alone, worker, _Neighbours(setup, index))
    if on_gpu:
        torch.cuda.synchronize(setup.device)


def _alone(setup: Setup) -> Setup:
    """Return a setup with one replica of every stage: workers are numbered like positions in it."""
    once = (1,) * setup.pipeline.num_stages
    evaluation = replace(setup.evaluation, pipeline=replace(setup.evaluation.pipeline, replicas=once))
    return replace(
        setup, pipeline=replace(setup.pipeline, replicas=once, shares_norm=False), evaluation=evaluation
    )  # fmt: skip


class _Neighbours:
    """A transport to the workers from which stages read values, and to those that read theirs; gradients are zeros.

    Replicas of a stage send to those replicas of another that have nobody else to hear from.
    """

    def __init__(self, setup: Setup, index: int) -> None:
        self._setup = setup
        self._own = setup.pipeline.replica_of(index)
        self._ranks = ranks_of(setup)
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self._senders: dict[tuple[int, int], list[ChannelSender]] = {}
        self._sent: dict[tuple[int, int], Any] = {}

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Send a stage's values on; gradients stay here."""
        if kind == GRADIENT:
            return
        edge, replicas = (source, target), self._setup.pipeline.replicas
        others = range(self._own, replicas[target], replicas[source])
        senders = self._senders.setdefault(
            edge, [ChannelSender(self._link(edge, target, other), 0) for other in others]
        )
        for sender in senders:
            sender.send(unit, values, _NOTHING)
        self._sent[edge] = values

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Return the values that a stage reads, or a gradient of zeros for those that it has sent."""
        if kind == GRADIENT:
            return _zeros(self._sent[target, source])
        edge = (source, target)
        if edge not in self._receivers:
            self._receivers[edge] = Receiver(self._link(edge, source, self._own), 0)
        self._receivers[edge].expect(1)
        return pytree.tree_map(self._onto_device, self._receivers[edge].receive(unit).values)

    def copied(self, kind: str, num_bytes: int) -> None:
        """Nobody counts."""

    def flush(self) -> None:
        """Wait until everything has left."""
        for senders in self._senders.values():
            for sender in senders:
                sender.flush()

    def _link(self, edge: tuple[int, int], stage: int, replica: int) -> ChannelLink:
        # Messages end in the host's memory, and in such as isn't pinned: what is pinned once stays so.
        pipeline = self._setup.pipeline
        tag = _TAG + _TAGS_OF_EDGE * (edge[0] * pipeline.num_stages + edge[1])
        return ChannelLink(self._ranks[pipeline.worker(stage, replica)], [None], tag, None, _CPU, lambda: 0.0)

    def _onto_device(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(self._setup.device).requires_grad_(leaf.requires_grad)


class _Nobody:
    """The collectives of a worker that is alone."""

    def on_gradient(self, stage: int) -> None:
        """Nobody takes gradients."""

    def contribute(self, stage: int, replica: int, round_index: int, gradients: Sequence[Any]) -> NoReturn:
        """No stage has replicas."""
        raise AssertionError

    def wait(self, stage: int, round_index: int) -> NoReturn:
        """No stage has replicas."""
        raise AssertionError

    def norm(self, round_index: int) -> NoReturn:
        """No norm is shared."""
        raise AssertionError


def _train(setup: Setup, worker: Worker, neighbours: _Neighbours) -> None:
    feed, divisors = training_feed(setup, 0, 1)
    try:
        worker.begin_training(feed, 0, 1, divisors)
        _play(_of_first_unit(programs(setup.pipeline, 1)[worker.index]), worker, neighbours)
    finally:
        feed.close()


def _evaluate(setup: Setup, worker: Worker, neighbours: _Neighbours) -> None:
    feed = Feed(setup, "eval", 0, 1)
    try:
        worker.begin_evaluation(feed, Scores(setup.dataset))
        _play(forward_programs(setup.evaluation.pipeline, 1)[worker.index], worker, neighbours)
    finally:
        feed.close()


def _of_first_unit(program: Iterable[Instruction]) -> Iterator[Instruction]:
    return (it for it in program if it.op is Op.UPDATE or it.number == _UNIT)


def _play(program: Iterable[Instruction], worker: Worker, neighbours: _Neighbours) -> None:
    for instruction in program:
        worker.execute(instruction, neighbours, _Nobody())
    neighbours.flush()


def _zeros(values: Mapping[int, Any]) -> dict[int, list[torch.Tensor]]:
    """Return a gradient of zeros for everything that one comes back for."""
    leaves = {layer: pytree.tree_leaves(value) for layer, value in values.items()}
    return {
        layer: [torch.zeros_like(leaf) for leaf in found if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for layer, found in leaves.items()
    }


def _kept_random_state(device: torch.device) -> AbstractContextManager[None]:
    devices = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices, device_type="cuda")
