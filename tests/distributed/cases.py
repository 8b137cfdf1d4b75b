"""What runs in the processes of the tests: training with the distributed engine, and what it comes to.

Everything is called by name in a process of its own, so arguments are plain values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pipebench.engine.distributed import DistributedEngine
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.network import Network
from pipebench.world import World
from tests.models import ConvNet, SkipNet
from tests.support import Blobs, Mlp, make_setup


@dataclass(frozen=True)
class Case:
    """A recipe in small.

    Attributes:
        model: a name of `MODELS`.
        starts: first layers of all stages but the first.
        replicas: per stage.
        columns: of `make_setup`.
        segments: minibatches between drains.
    """

    model: str
    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    segments: tuple[int, ...] = (7, 5)


def images() -> Blobs:
    """Return image data in single precision, the last minibatch of an epoch a short one."""
    data = Blobs(num_train=46, shape=(2, 8, 8))
    data._x = data._x.float()
    return data


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all cases."""
    return torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=0.01, fused=True)


def small_setup(case: Case) -> Setup:
    """Return the setup of a case."""
    data = images() if case.model == "conv" else Blobs(num_train=46)
    model = {"conv": ConvNet, "skip": SkipNet, "mlp": Mlp}[case.model]()
    return make_setup(
        model, (list(case.starts), list(case.replicas)), dataset=data, make_optimizer=momentum, **case.columns
    )


@dataclass
class Outcome:
    """What a run came to, in one process or in all."""

    tensors: list[dict[str, torch.Tensor]]  # per worker
    losses: list[tuple[float, float]]
    scores: list[dict[str, float]]
    num_bytes: dict[tuple[str, str], int]
    versions: list[int]


def distributed(world: World, case: Case) -> Outcome:
    """Run a case on the processes; return this one's share."""
    setup = replace(small_setup(case), device=world.device)
    losses: list[tuple[float, float]] = []
    engine = DistributedEngine(setup, world, on_loss=lambda loss, n, weight, s: losses.append((float(loss), weight)))
    engine.start_clock()
    scores, done = [], 0
    for count in case.segments:
        assert engine.train(done, count) == count
        done += count
        scores.append(engine.evaluate())
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in engine.worker.replica.tensors().items()}
    return Outcome([tensors], losses, scores, dict(engine.num_bytes), [engine.worker.replica.weights.most_alive])


def virtually(case: Case) -> Outcome:
    """Run a case on the virtual engine."""
    setup = small_setup(case)
    losses: list[tuple[float, float]] = []
    engine = VirtualEngine(
        setup, Network(setup.cluster), on_loss=lambda loss, n, weight, s: losses.append((float(loss), weight))
    )
    scores, done = [], 0
    for count in case.segments:
        engine.train(done, count)
        done += count
        scores.append(engine.evaluate())
    tensors = [{name: tensor.detach() for name, tensor in replica.tensors().items()} for replica in engine.replicas]
    versions = [replica.weights.most_alive for replica in engine.replicas]
    return Outcome(tensors, losses, scores, dict(engine.num_bytes), versions)
