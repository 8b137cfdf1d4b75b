"""From a recipe to everything an engine needs: model, data, profile, plan, pipeline, costs.

Every step is a function of what the steps before it gave, so that each can be called, printed and tested alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from pipebench import profile as profiles
from pipebench.cluster import Cluster
from pipebench.costs import stage_costs
from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.graph import LayerGraph, trace
from pipebench.modes import Mode, resolve
from pipebench.optimizer import make_optimizer
from pipebench.plan import Plan, balanced_plan, explicit_plan
from pipebench.profile.model import Profile
from pipebench.recipe import options
from pipebench.recipe.schema import Recipe, TrainRecipe
from pipebench.sampling import Sampler, microbatch_sizes, mix, name_hash, seed_default_generator
from pipebench.schedule.pipeline import Edge, Pipeline, noam
from zoo.registry import Dataset


@dataclass(frozen=True)
class Prepared:
    """A recipe, ready to run.

    Attributes:
        recipe: the recipe.
        cluster: the cluster, with as many servers as the recipe asks for.
        profile: layer costs at every size that travels.
        setup: what the engine takes.
    """

    recipe: Recipe
    cluster: Cluster
    profile: Profile
    setup: Setup


def prepare(
    recipe: Recipe,
    cluster: Cluster,
    replicas: Sequence[int],
    on_progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Make a recipe ready to run.

    Args:
        recipe: a validated recipe.
        cluster: the cluster it names.
        replicas: replicas per stage that its plan stands for.
        on_progress: told of (layers profiled, layers to profile).

    Raises:
        PlanError, GraphError, ProfileError: what the model turns out not to allow.
    """
    device = choose_device(recipe.engine.device)
    dataset: Dataset = options.make_dataset(recipe.dataset)
    model = initial_model(recipe)
    graph = trace(model, list(recipe.model.get("leaves") or ()))
    if len(graph.inputs) != len(dataset.inputs):
        raise PlanError(
            f"the model reads {len(graph.inputs)} inputs ({', '.join(graph.inputs)}), "
            f"but dataset {recipe.dataset.get('name')} feeds {len(dataset.inputs)} ({', '.join(dataset.inputs)})"
        )
    sampler = Sampler(dataset.num_train, recipe.train.minibatch_size, recipe.train.seed)
    mode = resolve(recipe.parallelism)
    sizes = travelling_sizes(recipe, dataset)
    profile = profiles.profile_for(recipe, cluster, graph, dataset, sizes, device, on_progress)
    plan = make_plan_for(recipe, graph, profile, replicas)
    pipeline = make_pipeline(recipe, mode, graph, plan, profile)
    costs = stage_costs(profile, plan, recompute=mode.recompute)
    setup = Setup(
        graph=graph,
        plan=plan,
        pipeline=pipeline,
        costs=costs,
        cluster=cluster,
        dataset=dataset,
        sampler=sampler,
        make_optimizer=partial(make_optimizer, recipe.train.optimizer),
        lr=learning_rate(recipe.train, pipeline, dataset.num_train),
        weights=mode.weights,
        recompute=mode.recompute,
        clip_norm=recipe.train.optimizer.clip_norm,
        seed=recipe.train.seed,
        device=device,
    )
    return Prepared(recipe, cluster, profile, setup)


def choose_device(name: str) -> torch.device:
    """Return the device of `auto`, `cpu` or `cuda`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def initial_model(recipe: Recipe) -> nn.Module:
    """Return the whole model, initialised under the recipe's seed, however it is cut later."""
    seed_default_generator(torch.device("cpu"), mix(recipe.train.seed, name_hash("initial weights")))
    made: nn.Module = options.make_model(recipe.model)
    return made


def travelling_sizes(recipe: Recipe, dataset: Dataset) -> tuple[int, ...]:
    """Return every number of samples a unit can have, in training and evaluation."""
    size, microbatches = recipe.train.minibatch_size, recipe.parallelism.microbatches
    minibatches = {min(size, dataset.num_train), dataset.num_train % size}
    units = {part for n in minibatches for part in microbatch_sizes(n, microbatches)}
    evaluation = {min(size, dataset.num_eval), dataset.num_eval % size}
    return tuple(sorted((units | evaluation) - {0}))


def make_plan_for(recipe: Recipe, graph: LayerGraph, profile: Profile, replicas: Sequence[int]) -> Plan:
    """Return the recipe's plan: cut where it says, else balanced for the size that travels.

    Raises:
        PlanError: the model doesn't allow it.
    """
    parallelism = recipe.parallelism
    if parallelism.cuts is not None:
        return explicit_plan(graph, parallelism.cuts, replicas)
    travels = max(microbatch_sizes(recipe.train.minibatch_size, parallelism.microbatches))
    return balanced_plan(graph, profile, min(travels, max(profile.layers)), replicas)


def make_pipeline(recipe: Recipe, mode: Mode, graph: LayerGraph, plan: Plan, profile: Profile) -> Pipeline:
    """Return the pipeline's shape: the plan's stages under the mode's order of work."""
    rows = next(iter(profile.layers.values()))
    edges = tuple(
        Edge(source, target, any(rows[value].gradient_bytes for value in values))
        for (source, target), values in plan.crossings.items()
    )
    parallelism = recipe.parallelism
    depth = mode.depth or (noam(plan.replicas) if parallelism.depth == "auto" else int(parallelism.depth))
    loads = tuple(
        index
        for index, stage in enumerate(plan.stages)
        if any(layer.inputs for layer in graph.layers[stage.start : stage.stop])
    )
    return Pipeline(
        replicas=plan.replicas,
        edges=edges,
        order=mode.order,
        flushes=mode.flushes,
        depth=depth,
        microbatches=parallelism.microbatches,
        accumulate=parallelism.accumulate,
        loads=loads,
        shares_norm=recipe.train.optimizer.clip_norm is not None and mode.flushes and len(plan.stages) > 1,
    )


def learning_rate(train: TrainRecipe, pipeline: Pipeline, num_train: int) -> Callable[[int, int, int], float]:
    """Return the rate of an update as a function of (stage, samples seen before it, its own samples).

    The schedule goes by samples seen before the update. Warm-up counts the update's own samples too, so that no
    update has a rate of zero. `lr_scaling: replicas` scales by the stage's samples per update over the input stage's;
    in flushing modes all stages have the same.
    """
    schedule, base = train.schedule, train.optimizer.lr
    scaled = train.optimizer.lr_scaling == "replicas"
    scale = [pipeline.round_size(s) / pipeline.round_size(0) if scaled else 1.0 for s in range(pipeline.num_stages)]
    warmup, total = schedule.warmup_epochs * num_train, train.max_epochs * num_train

    def rate(stage: int, before: int, own: int) -> float:
        factor = 1.0
        if before < warmup:
            factor = min(1.0, (before + own) / warmup)
        elif schedule.name == "step":
            assert schedule.every_epochs is not None
            assert schedule.factor is not None
            factor = schedule.factor ** math.floor(before / (schedule.every_epochs * num_train))
        elif schedule.name == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * (before - warmup) / max(1, total - warmup)))
        return base * scale[stage] * factor

    return rate
