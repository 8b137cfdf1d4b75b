"""Small models, a small data set and setups with unit costs, shared by the tests."""

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import pipebench
from pipebench.cluster import Cluster, Level
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.model.copies import copied
from pipebench.model.graph import LayerGraph, attribute, averaged_buffers, forget_states, run_node, trace
from pipebench.model.optimizer import MakeOptimizer
from pipebench.model.plan import Plan, make_plan, tied_parameters
from pipebench.model.precision import in_precision, lower
from pipebench.model.rounded_data import RoundedData
from pipebench.model.sampling import InOrder, Sampler
from pipebench.profile.model import LayerProfile, Profile
from pipebench.recipe.schema import LossScaleRecipe
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.pipeline import Edge, Pipeline
from pipebench.schedule.placement import places
from pipebench.simulate.costs import loading_stages, stage_costs
from pipebench.simulate.evaluation import evaluation_of
from pipebench.simulate.network import Network
from pipebench.zoo.registry import Dataset


def raise_as_ours(error: BaseException) -> NoReturn:
    """Raise an error in a file of pipebench: errors from other files, also of tests, are reported as the user's."""
    file = Path(pipebench.__file__).with_name("raised_by_a_test.py")
    exec(compile("raise error", str(file), "exec"), {"error": error})
    raise AssertionError


class Blobs(Dataset):
    """Random features and labels."""

    inputs: Sequence[str] = ("x",)
    targets: Sequence[str] = ("label",)
    metrics: Mapping[str, str] = {"top1": "max"}

    def __init__(
        self, num_train: int = 48, num_eval: int = 10, shape: Sequence[int] = (6,), classes: int = 4,
        dtype: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self.num_train, self.num_eval = num_train, num_eval
        self._x = torch.randn(num_train + num_eval, *shape, generator=generator, dtype=torch.float64).to(dtype)
        self._label = torch.randint(classes, (num_train + num_eval,), generator=generator)

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[:num_samples].to("meta"), "label": self._label[:num_samples].to("meta")}

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        rows = torch.tensor([i + (self.num_train if split == "eval" else 0) for i in indices], dtype=torch.long)
        return {field: {"x": self._x, "label": self._label}[field][rows] for field in fields}

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(output, targets["label"], reduction="sum")

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"top1": (output.argmax(1) == targets["label"]).sum()}


class Mlp(nn.Module):
    """Four linear layers with tanh: eight layers to cut."""

    def __init__(self, *, seed: int = 3) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        sizes = [6, 7, 8, 5, 4]
        self.body = nn.Sequential()
        for a, b in itertools.pairwise(sizes):
            self.body.append(nn.Linear(a, b))
            if b != sizes[-1]:
                self.body.append(nn.Tanh())
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 6] to [samples, 4]."""
        return self.body(x)


class HalfTrained(Mlp):
    """An `Mlp` whose first linear layer and the weight of another one aren't trained."""

    def __init__(self) -> None:
        super().__init__()
        for frozen in (*self.body[0].parameters(), self.body[4].weight):
            frozen.requires_grad_(False)


class FineTuned(HalfTrained):
    """A `HalfTrained` with two distant layers that share a parameter that isn't trained, and a buffer."""

    constant: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((3, 1), 0.9, dtype=torch.float64), requires_grad=False)
        self.register_buffer("constant", torch.full((5,), 1.1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 6] to [samples, 4]."""
        for index, layer in enumerate(self.body):
            x = layer(x) * self.factor.mean() * self.constant.mean() if index in (0, 5) else layer(x)
        return x


def unit_profile(graph: LayerGraph, dataset: Any, sizes: Sequence[int]) -> Profile:
    """Return a profile in which every forward takes 1 s and every backward 2 s; bytes are those of real tensors."""
    layers = {}
    root = copied(graph.root).train()  # running the model here must not change its running statistics
    lower([root], graph.rounding)
    exact, averaged = dict(graph.root.named_parameters()) if graph.rounding else {}, averaged_buffers(graph)
    trained = {name: parameter.nbytes for name, parameter in root.named_parameters()}
    for size in sizes:
        forget_states(root)
        env: dict[Any, Any] = {}
        fields = dataset.fetch("train", range(size), dataset.inputs)
        for node in graph.graph.find_nodes(op="placeholder"):
            env[node] = fields[dataset.inputs[graph.inputs.index(node.name)]]
        rows = []
        for layer in graph.layers:
            env[layer.node] = run_node(root, layer.node, env)
            leaves = [t for t in pytree.tree_leaves(env[layer.node]) if isinstance(t, torch.Tensor)]
            num_bytes = sum(t.nbytes for t in leaves)
            with_gradient = sum(t.nbytes for t in leaves if t.requires_grad)
            parameters = {n: trained[n] for n in trained if n in layer.parameters}
            untrained = {name: attribute(root, name).nbytes for name in layer.untrained}
            masters = {name: exact[name].nbytes for name in parameters if name in exact}
            buffers = {n: attribute(graph.root, n).nbytes if n in averaged else 0 for n in layer.buffers}
            rows.append(
                LayerProfile(
                    layer.name, layer.kind, 1.0, 2.0, num_bytes, with_gradient,
                    layer.reads, layer.inputs, parameters, buffers, master_sizes=masters,
                    untrained_sizes=untrained,
                )
            )  # fmt: skip
        rows.append(LayerProfile("loss", "loss", 0.0, 0.0, 8, 8, graph.outputs))
        layers[size] = tuple(rows)
    zeros = dict.fromkeys(layers, 0.0)
    return Profile("test", "unit", "file", "unit costs", layers, 1e-9, 0.0, zeros, {})


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD in torch's default implementation; the engine's is the fused one."""
    return torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=0.01)


def flat_cluster(num_workers: int) -> Cluster:
    return Cluster("flat", "unit", None, (Level("server", num_workers, 1e6, 1e-3),))


def pipeline_of(graph: LayerGraph, plan: Plan, rows: Sequence[LayerProfile], **shape: Any) -> Pipeline:
    """Return the pipeline of a plan; `shape` are the other fields of `Pipeline`."""
    edges = tuple(Edge(a, b, any(rows[v].gradient_bytes for v in values)) for (a, b), values in plan.crossings.items())
    swaps = tuple(i for i, s in enumerate(plan.stages) if SWAP in s.memory)
    ties = tuple(tied_parameters(rows, plan))
    return Pipeline(
        replicas=plan.replicas, edges=edges, loads=loading_stages(plan, rows), swaps=swaps, ties=ties, **shape
    )


def _memory(graph: LayerGraph, recompute: bool | Container[int]) -> list[str]:
    """Return the memory policy of every layer: recomputation of all, none or those in `recompute`."""
    every = range(len(graph.layers))
    chosen = recompute if not isinstance(recompute, bool) else every if recompute else ()
    return [RECOMPUTE if index in chosen else KEEP for index in every]


def make_setup(
    model: nn.Module,
    plan: Plan | tuple[Sequence[int], Sequence[int]],
    *,
    order: str = "1f1b",
    weights: str = "stash",
    sync: str = "all-reduce",
    sums: str = "ring",
    shard: str = "none",
    reshards: bool = True,
    depth: int | None = None,
    microbatches: int = 1,
    accumulate: int = 1,
    chunks: int = 1,
    push_order: Mapping[int, Sequence[int]] | None = None,
    recompute: bool | Container[int] = False,
    memory: Sequence[str] | None = None,
    backward: str = "whole",
    devices: Sequence[int] | None = None,
    minibatch_size: int = 4,
    dataset: Any = None,
    make_optimizer: MakeOptimizer = lambda p: torch.optim.SGD(p, 0.1),
    lr: Callable[[int, int, int], float] = lambda stage, before, own: 0.1,
    cluster: Cluster | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
    sampler: Sampler | None = None,
    held_out: Sampler | None = None,
    graph: LayerGraph | None = None,
    sizes: Sequence[int] | None = None,
    precision: str = "fp32",
    loss_scale: LossScaleRecipe | None = None,
    correction_decay: float = 0.135,
    relay: bool = False,
    steps_on_whole: bool = False,
    repartitions: bool = False,
    ties: bool = False,
    compiled: bool = False,
    channels_last: bool = False,
) -> Setup:
    """Return a setup with unit costs; `plan` is a plan or (starts of later stages, replicas)."""
    graph = in_precision(graph or trace(model), precision)
    dataset = dataset or Blobs()
    if graph.rounding is not None:
        dataset = RoundedData(dataset, graph.rounding.low_type)
    if not isinstance(plan, Plan):
        memory = memory or _memory(graph, recompute)
        plan = make_plan(
            graph, *plan, devices=places(order, plan[1], chunks), depth=depth, chunks=chunks, memory=memory,
            relay=relay, ties=ties,
        )  # fmt: skip
        plan = plan.on(devices or plan.devices)
    profile = unit_profile(graph, dataset, sizes or range(1, minibatch_size + 1))
    if not dataset.targets_apart:
        profile = profile.with_rows(lambda rows: (*rows[:-1], replace(rows[-1], reads_samples=True)))
    rows = profile.layers[minibatch_size]
    flushes, agrees = weights == "one", clip_norm is not None or loss_scale is not None
    agrees &= flushes and (len(plan.stages) > 1 or shard != "none")
    pipeline = pipeline_of(
        graph, plan, rows, order=order, flushes=flushes, depth=depth or plan.depth, microbatches=microbatches,
        accumulate=accumulate, shares_norm=agrees, weights=weights, chunks=chunks,
        sync=sync, backward=backward, sums=sums, shard=shard, reshards=reshards,
    )  # fmt: skip
    pipeline = replace(pipeline, extensions={} if push_order is None else {"asynchronous": push_order})
    return Setup(
        graph=graph, plan=plan, pipeline=pipeline, profile=profile,
        costs=stage_costs(profile, plan, sharded=pipeline.is_sharded),
        evaluation=evaluation_of(graph, plan, pipeline, profile, dataset),
        cluster=cluster or flat_cluster(pipeline.num_workers),
        dataset=dataset,
        sampler=sampler or Sampler(dataset.num_train, minibatch_size, seed),
        held_out=held_out or InOrder(dataset.num_eval, minibatch_size),
        make_optimizer=make_optimizer, lr=lr, clip_norm=clip_norm, seed=seed, device=torch.device("cpu"),
        loss_scale=loss_scale, correction_decay=correction_decay, repartitions=repartitions,
        steps_on_whole=steps_on_whole, compiled=compiled, channels_last=channels_last,
    )  # fmt: skip


def make_engine(setup: Setup, observe: Callable[[Any], None] = lambda event: None) -> VirtualEngine:
    """Return a virtual engine on a network of the setup's cluster."""
    return VirtualEngine(setup, Network(setup.cluster, setup.devices, copies=setup.copies), observe)


def parameters_of(engine: VirtualEngine) -> dict[str, torch.Tensor]:
    """Return the newest parameters by the model's names, checking that replicas agree."""
    found: dict[str, torch.Tensor] = {}
    for replica in engine.replicas:
        for name, parameter in zip(replica.weights.names, replica.weights.newest.parameters, strict=True):
            value = parameter.detach().clone()
            if name in found:
                assert torch.equal(found[name], value), f"replicas disagree on {name}"
            found[name] = value
    return found
