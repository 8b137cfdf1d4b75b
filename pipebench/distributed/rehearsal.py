"""A rehearsal: one minibatch through every stage before the clock, on copies that are thrown away.

The first forward, backward and update of a stage load the GPU's code, choose algorithms and ask for memory. CUDA may
let such a thing wait until everything that runs on the device has ended; with a kernel of NCCL among it, waiting for a
peer which waits for us, it never would. So all of it happens once while nothing is on its way between GPUs: values go
from stage to stage by Gloo, a copy of every stage computes, and the run finds everything as it would have without.

Only GPUs have a use for it; it computes anywhere, and the tests look for its traces on a CPU.

Everything is a copy (weights, optimizer, running statistics, carried states) or is put back (random generators).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipebench.distributed.channel import Link, Receiver, Sender
from pipebench.distributed.world import World
from pipebench.engine.feed import Feed
from pipebench.engine.replica import Values
from pipebench.engine.scores import Scores
from pipebench.engine.setup import Setup, ranks_of
from pipebench.engine.worker import Worker, training_feed
from pipebench.model.stage import Stage

_TAG = 6  # of its messages, on the group of all processes; those of the channels have groups of their own
_UNIT = 0
_NOTHING = float("nan")
_CPU = torch.device("cpu")


def gains_by_rehearsal(device: torch.device) -> bool:
    """Say whether first times matter: on a CPU nothing waits for a device."""
    return device.type == "cuda"


def rehearse(setup: Setup, world: World, index: int) -> None:
    """Run the run's first minibatch, and an evaluation's, through a copy of this worker's stage; all processes call it.

    Every stage has one replica here, which all its workers play: minibatch 0 is everybody's.

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
        worker = Worker(alone, setup.pipeline.places[index][0])
        stage = worker.replica.stage
        _train(alone, worker, _Neighbours(setup, stage, index))
        assert stage.evaluation is not None
        _evaluate(alone, worker, _Neighbours(setup, stage.evaluation, index))
    if on_gpu:
        torch.cuda.synchronize(setup.device)


def _alone(setup: Setup) -> Setup:
    """Return a setup with one replica of every stage: workers are numbered like stages in it."""
    once = (1,) * setup.pipeline.num_stages
    evaluation = replace(setup.evaluation, pipeline=replace(setup.evaluation.pipeline, replicas=once))
    return replace(setup, pipeline=replace(setup.pipeline, replicas=once), evaluation=evaluation)


class _Neighbours:
    """The workers from which a stage reads values, and those that read its own, as far as this worker is concerned."""

    def __init__(self, setup: Setup, stage: Stage, index: int) -> None:
        self._device = setup.device
        ranks, pipeline = ranks_of(setup), setup.pipeline
        own = pipeline.places[index][1]
        replicas = pipeline.replicas[stage.index]

        def link(stage_index: int, replica: int) -> Link:
            # Messages end in the host's memory, and in such as isn't pinned: what is pinned once stays so.
            rank = ranks[pipeline.worker(stage_index, replica)]
            return Link(rank, [None], _TAG, None, _CPU, lambda: 0.0)

        self._sources = {source: Receiver(link(source, own), 0) for source in stage.receives}
        self._targets = {
            target: [Sender(link(target, other), 0) for other in range(own, pipeline.replicas[target], replicas)]
            for target in stage.sends
        }

    def receive(self, worker: Worker) -> None:
        """Give a worker the values that its stage reads."""
        for source in self._sources.values():
            source.expect(1)
            values = source.receive(_UNIT).values
            worker.take_activation(_UNIT, pytree.tree_map(self._onto_device, values))

    def send(self, worker: Worker) -> dict[int, Values]:
        """Send a worker's values on; return them by the stage that reads them."""
        found = {target: worker.activation_for(_UNIT, target) for target in self._targets}
        for target, senders in self._targets.items():
            for sender in senders:
                sender.send(_UNIT, found[target], _NOTHING)
        return found

    def flush(self) -> None:
        """Wait until everything has left."""
        for senders in self._targets.values():
            for sender in senders:
                sender.flush()

    def _onto_device(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(self._device).requires_grad_(leaf.requires_grad)


def _train(setup: Setup, worker: Worker, neighbours: _Neighbours) -> None:
    feed, divisors = training_feed(setup, 0, 1)
    try:
        worker.begin_training(feed, 0, 1, divisors)
        worker.load(_UNIT)
        neighbours.receive(worker)
        worker.forward(_UNIT)
        for values in neighbours.send(worker).values():
            worker.take_gradient(_UNIT, _zeros(values))
        worker.backward(_UNIT)
        worker.update(0)
        neighbours.flush()
    finally:
        feed.close()


def _evaluate(setup: Setup, worker: Worker, neighbours: _Neighbours) -> None:
    feed = Feed(setup, "eval", 0, 1)
    try:
        worker.begin(feed, 0, 1)
        neighbours.receive(worker)
        output = worker.evaluate(_UNIT)
        neighbours.send(worker)
        if worker.replica.stage.is_last:
            Scores(setup.dataset).add(output, feed.targets(_UNIT), feed.weight(_UNIT))
        neighbours.flush()
    finally:
        feed.close()


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
