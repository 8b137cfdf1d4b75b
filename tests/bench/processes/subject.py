"""The subject of the bench: VGG-16, its data, where it is cut, and setups of the engine for every configuration."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pipebench.cluster import Cluster
from pipebench.distributed.world import current
from pipebench.engine.setup import Setup
from pipebench.model.device import torch_settings
from pipebench.model.graph import LayerGraph, trace
from pipebench.model.optimizer import make_optimizer
from pipebench.model.plan import Plan, make_plan
from pipebench.model.precision import in_precision
from pipebench.model.rounded_data import RoundedData
from pipebench.model.sampling import InOrder, Sampler
from pipebench.planner.predict import make_pipeline, with_sums
from pipebench.profile.model import Profile
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe
from pipebench.schedule.modes import MODES
from pipebench.simulate.costs import NO_HOST_COSTS, HostCosts, stage_costs
from pipebench.simulate.evaluation import evaluation_of
from pipebench.zoo.mnist5k import Mnist5k, mnist5k
from pipebench.zoo.registry import Dataset
from pipebench.zoo.synthetic import synthetic
from pipebench.zoo.vgg import vgg16

_DIGITS, _NUM_NOISE = 32, 8192  # pixels; samples
OPTIMIZER = OptimizerRecipe(name="sgd", lr=0.01, momentum=0.9, weight_decay=5e-4)


# Fields of the subject by the name of a setting, which follows a side's name ("single+tf32").
SETTINGS: dict[str, dict[str, Any]] = {
    "tf32": {"tf32": True},
    "bf16": {"precision": "bf16"},
    "free": {"deterministic": False},  # kernels needn't be deterministic, and cuDNN benchmarks algorithms
    "untried": {"deterministic": False, "benchmark": False},  # the same without cuDNN's benchmark
    "compile": {"compile": True},
    "channels_last": {"channels_last": True},
    "unfused": {"fused": False},
}


@dataclass(frozen=True)
class Subject:
    """The model, the sizes of minibatches and the settings of torch; JSON can hold its fields.

    Attributes:
        width: of VGG-16's layers; 1.0 is the published network's 33.6 M parameters at this image size.
        minibatch_size: samples.
        microbatches: of gpipe, 1F1B with a flush and torch's schedules.
        double: whether it computes in double precision: results that differ by more than its rounding are of different
            computations.
        image_size: 32 for digits in ten classes; for others, noise of three channels in a thousand classes.
        device: `cpu` or `cuda`, of every process.
        precision: as in a recipe; the plain loop uses autocast.
        tf32: as in a recipe.
        deterministic: as in a recipe.
        compile: as in a recipe.
        channels_last: as in a recipe.
        benchmark: whether cuDNN benchmarks algorithms; by default, unless kernels have to be deterministic.
        fused: whether the optimizer is fused.
    """

    width: float = 0.25
    minibatch_size: int = 64
    microbatches: int = 4
    double: bool = False
    image_size: int = _DIGITS
    device: str = "cpu"
    precision: str = "fp32"
    tf32: bool = False
    deterministic: bool = True
    compile: bool = False
    channels_last: bool = False
    benchmark: bool | None = None
    fused: bool = True

    def __str__(self) -> str:
        what = "digits" if self.image_size == _DIGITS else "images"
        return (
            f"VGG-16 with BatchNorm, width {self.width:g}, minibatches of {self.minibatch_size} {what} of "
            f"{self.image_size}x{self.image_size}, {self.microbatches} microbatches where there are any"
        )

    def with_settings(self, *names: str) -> "Subject":
        return replace(self, **{key: value for name in names for key, value in SETTINGS[name].items()})

    @property
    def engine(self) -> EngineRecipe:
        """The engine's settings; a process on CPUs has one thread."""
        threads = 1 if self.device == "cpu" else "auto"
        return EngineRecipe(
            threads=threads, deterministic=self.deterministic, tf32=self.tf32, channels_last=self.channels_last
        )

    @contextmanager
    def settings(self) -> Iterator[None]:
        with torch_settings(self.engine):
            if self.benchmark is not None:
                torch.backends.cudnn.benchmark = self.benchmark
            yield

    @property
    def place(self) -> torch.device:
        world = current()
        return torch.device(self.device) if world is None else world.device

    @property
    def make_optimizer(self) -> Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]:
        return partial(sgd, fused=self.fused)

    def model(self) -> nn.Module:
        """Return the model, always with the same weights."""
        torch.default_generator.manual_seed(0)
        classes, channels = (10, 1) if self.image_size == _DIGITS else (1000, 3)
        made: nn.Module = vgg16(
            width=self.width, batch_norm=True, dropout=0.0, num_classes=classes, in_channels=channels,
            image_size=self.image_size, init="kaiming",
        )  # fmt: skip
        return made.to(torch.float64 if self.double else torch.float32).train()

    def data(self) -> Dataset:
        """Return the data set, in double precision if the model is."""
        if self.image_size != _DIGITS:
            return synthetic((3, self.image_size, self.image_size), num_train=_NUM_NOISE, num_eval=self.minibatch_size)
        digits = mnist5k()
        return _InDouble(digits.image_size, digits.split_seed, digits.num_train) if self.double else digits

    def graph(self) -> LayerGraph:
        return in_precision(trace(self.model()), self.precision)

    def sampler(self) -> Sampler:
        """Return the sampler; all minibatches are whole, since torch's schedules need that."""
        whole = self.data().num_train // self.minibatch_size * self.minibatch_size
        return Sampler(whole, self.minibatch_size, 0)


class _InDouble(Mnist5k):
    """The digits in double precision."""

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        found = super().fetch(split, indices, fields, draw)
        return {name: value.double() if name == "image" else value for name, value in found.items()}


@dataclass(frozen=True)
class Case:
    """One configuration; JSON can hold its fields."""

    mode: str  # of the table of modes, without recomputation
    starts: tuple[int, ...]  # first layers of the stages after the first
    replicas: tuple[int, ...]  # of every stage
    depth: int | None = None  # minibatches in flight per input-stage replica; None for the mode's own, or NOAM
    microbatches: int = 1  # per minibatch
    accumulate: int = 1  # minibatches of every replica per update

    @property
    def num_workers(self) -> int:
        return self.replicas[0] if MODES[self.mode].is_sharded else sum(self.replicas)

    def __str__(self) -> str:
        words = [self.mode, "-".join(map(str, self.replicas))]
        words += [f"cut {'+'.join(map(str, self.starts))}"] if self.starts else []
        words += [f"depth {self.depth}"] if self.depth else []
        words += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        words += [f"{self.accumulate} accumulated"] if self.accumulate > 1 else []
        return ", ".join(words)


def sgd(parameters: Sequence[torch.Tensor], *, fused: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer that every side uses."""
    recipe = OPTIMIZER if fused else replace(OPTIMIZER, arguments={"foreach": True})
    return make_optimizer(recipe, parameters)


def make_setup(
    subject: Subject, case: Case, profile: Profile, cluster: Cluster, host: HostCosts = NO_HOST_COSTS
) -> Setup:
    """Return the engine's setup of a case, with the costs of a profile and the links of a cluster."""
    graph, dataset, row = subject.graph(), subject.data(), MODES[case.mode]
    if graph.rounding is not None:
        dataset = RoundedData(dataset, graph.rounding.low_type)
    chunks = len(case.replicas) if row.is_sharded else 1
    plan = make_plan(graph, case.starts, case.replicas, mode=case.mode, depth=case.depth or row.depth, chunks=chunks)
    row = with_sums(row, cluster, plan)
    rows = profile.rows
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
        make_optimizer=subject.make_optimizer,
        lr=lambda stage, before, own: OPTIMIZER.lr,
        clip_norm=None,
        seed=0,
        device=subject.place,
        compiled=subject.compile,
        channels_last=subject.channels_last,
    )


def cut_at(profile: Profile, num_samples: int, share: float = 0.5) -> int:
    """Return the first layer of the second stage of the cut whose first stage has nearest to a share of the time."""
    rows = profile.layers[num_samples]
    seconds = [row.forward_s + row.backward_s for row in rows]
    starts = range(1, len(rows) - 1)  # the last row is the loss, which is no layer
    return min(starts, key=lambda start: abs(sum(seconds[:start]) - share * sum(seconds)))


def straight(subject: Subject, cut: int) -> tuple[LayerGraph, Plan]:
    graph = subject.graph()
    return graph, make_plan(graph, [cut], [1, 1])


class Minibatches:
    """Successive minibatches of the training data, loaded as the engine loads them, on this process's device.

    Of every `stride` minibatches, this process takes the one at index `offset`.
    """

    def __init__(self, subject: Subject, stride: int = 1, offset: int = 0) -> None:
        self._data = subject.data()
        self._place = subject.place
        self._sampler = subject.sampler()
        self._stride = stride
        self._next = offset

    def take(self, *fields: str) -> list[torch.Tensor]:
        """Return fields of the next minibatch: `image` [samples, channels, size, size], `label` [samples] int64."""
        found = self._data.fetch("train", self._sampler.indices(self._next), fields)
        self._next += self._stride
        return [found[field].to(self._place, non_blocking=True) for field in fields]
