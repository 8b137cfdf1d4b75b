"""What is run: VGG-16 on digits, where it is cut, and the setups of the engine for every way of running it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.model.graph import LayerGraph, trace
from pipebench.model.optimizer import make_optimizer
from pipebench.model.plan import Plan, make_plan
from pipebench.model.sampling import InOrder, Sampler
from pipebench.planner.predict import make_pipeline, with_sums
from pipebench.profile.model import Profile
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.schedule.modes import MODES
from pipebench.simulate.costs import NO_HOST_COSTS, HostCosts, stage_costs
from pipebench.simulate.evaluation import evaluation_of
from pipebench.zoo.mnist5k import Mnist5k, mnist5k
from pipebench.zoo.vgg import vgg16

OPTIMIZER = OptimizerRecipe(name="sgd", lr=0.01, momentum=0.9, weight_decay=5e-4)


@dataclass(frozen=True)
class Subject:
    """The model and what travels; JSON can hold its fields.

    Attributes:
        width: of VGG-16's layers; 1.0 is the published network's 33.6 M parameters at this image size.
        minibatch_size: digits of 32x32.
        microbatches: of gpipe, 1F1B with a flush and torch's schedules.
        double: whether it computes in double precision: slower, and what differs then by more than that rounds isn't
            the same computation.
    """

    width: float = 0.25
    minibatch_size: int = 64
    microbatches: int = 4
    double: bool = False

    def __str__(self) -> str:
        """Return it in words."""
        return (
            f"VGG-16 with BatchNorm, width {self.width:g}, minibatches of {self.minibatch_size} digits of 32x32, "
            f"{self.microbatches} microbatches where there are any"
        )

    def model(self) -> nn.Module:
        """Return the model, always with the same weights."""
        torch.default_generator.manual_seed(0)
        made: nn.Module = vgg16(
            width=self.width, batch_norm=True, dropout=0.0, num_classes=10, in_channels=1, image_size=32, init="kaiming"
        )
        return made.to(torch.float64 if self.double else torch.float32).train()

    def data(self) -> Mnist5k:
        """Return the digits, in the precision that it computes in."""
        digits = mnist5k()
        return _InDouble(digits.image_size, digits.split_seed, digits.num_train) if self.double else digits

    def graph(self) -> LayerGraph:
        """Return the model's layers."""
        return trace(self.model())

    def sampler(self) -> Sampler:
        """Return which digits make up minibatch k; all minibatches are whole, since torch's schedules want that."""
        whole = self.data().num_train // self.minibatch_size * self.minibatch_size
        return Sampler(whole, self.minibatch_size, 0)


class _InDouble(Mnist5k):
    """The digits in double precision."""

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """As its class, images as float64."""
        found = super().fetch(split, indices, fields, draw)
        return {name: value.double() if name == "image" else value for name, value in found.items()}


@dataclass(frozen=True)
class Case:
    """One way of running it; JSON can hold its fields.

    Attributes:
        mode: a row of the table of modes; nothing is recomputed.
        starts: first layers of the stages after the first.
        replicas: of every stage.
        depth: minibatches in flight per input-stage replica; None for the mode's own, or NOAM.
        microbatches: per minibatch.
        accumulate: minibatches of every replica per update.
    """

    mode: str
    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    depth: int | None = None
    microbatches: int = 1
    accumulate: int = 1

    @property
    def num_workers(self) -> int:
        """Number of processes."""
        return self.replicas[0] if MODES[self.mode].is_sharded else sum(self.replicas)

    def __str__(self) -> str:
        """Return it in a few words."""
        words = [self.mode, "-".join(map(str, self.replicas))]
        words += [f"cut {'+'.join(map(str, self.starts))}"] if self.starts else []
        words += [f"depth {self.depth}"] if self.depth else []
        words += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        words += [f"{self.accumulate} accumulated"] if self.accumulate > 1 else []
        return ", ".join(words)


def sgd(parameters: Sequence[torch.Tensor], *, fused: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer that every side uses, fused if that can be."""
    recipe = OPTIMIZER if fused else replace(OPTIMIZER, arguments={"foreach": True})
    return make_optimizer(recipe, parameters)


def make_setup(
    subject: Subject, case: Case, profile: Profile, cluster: Cluster, host: HostCosts = NO_HOST_COSTS
) -> Setup:
    """Return what the engine needs to run a case, with the costs of a profile and the links of a cluster."""
    graph, dataset, row = (
        subject.graph(),
        subject.data(),
        with_sums(MODES[case.mode], cluster, range(cluster.num_workers)),
    )
    chunks = len(case.replicas) if row.is_sharded else 1
    plan = make_plan(graph, case.starts, case.replicas, mode=case.mode, depth=case.depth or row.depth, chunks=chunks)
    rows = next(iter(profile.layers.values()))
    pipeline = make_pipeline(plan, rows, row, microbatches=case.microbatches, accumulate=case.accumulate)
    return Setup(
        graph=graph,
        plan=plan,
        pipeline=pipeline,
        profile=profile,
        costs=replace(stage_costs(profile, plan, sharded=row.is_sharded), host=host),
        evaluation=evaluation_of(graph, plan, pipeline, profile, dataset),
        cluster=cluster,
        dataset=dataset,
        sampler=subject.sampler(),
        held_out=InOrder(dataset.num_eval, subject.minibatch_size),
        make_optimizer=sgd,
        lr=lambda stage, before, own: OPTIMIZER.lr,
        clip_norm=None,
        seed=0,
        device=torch.device("cpu"),
    )


def cut_at(profile: Profile, num_samples: int, share: float = 0.5) -> int:
    """Return the layer before which a cut leaves the first stage nearest to a share of the time."""
    rows = profile.layers[num_samples]
    seconds = [row.forward_s + row.backward_s for row in rows]
    starts = range(1, len(rows) - 1)  # the last row is the loss, which is no layer
    return min(starts, key=lambda start: abs(sum(seconds[:start]) - share * sum(seconds)))


def straight(subject: Subject, cut: int) -> tuple[LayerGraph, Plan]:
    """Return the graph and the plan of two stages."""
    graph = subject.graph()
    return graph, make_plan(graph, [cut], [1, 1])


class Minibatches:
    """Successive minibatches of the training digits, loaded as the engine loads them.

    Args:
        subject: says how large.
        stride: every how many minibatches one is this process's.
        offset: the first of them.
    """

    def __init__(self, subject: Subject, stride: int = 1, offset: int = 0) -> None:
        self._data = subject.data()
        self._sampler = subject.sampler()
        self._stride = stride
        self._next = offset

    def take(self, *fields: str) -> list[torch.Tensor]:
        """Return fields of the next minibatch: `image` [samples, 1, 32, 32], `label` [samples] int64."""
        found = self._data.fetch("train", self._sampler.indices(self._next), fields)
        self._next += self._stride
        return [found[field] for field in fields]
