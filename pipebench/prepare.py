"""From a recipe to everything an engine needs: model, data, profile, plan, pipeline, costs.

Every step is a function of what the steps before it gave, so that each can be called, printed and tested alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from pipebench import profile as profiles
from pipebench.cluster import Cluster
from pipebench.costs import stage_costs
from pipebench.engine.setup import Setup
from pipebench.errors import PlanError
from pipebench.graph import LayerGraph, trace
from pipebench.modes import AUTO, resolve
from pipebench.optimizer import make_optimizer
from pipebench.plan import Plan, explicit_plan, make_plan
from pipebench.plan_text import parse_plan
from pipebench.planner.cost_models import find_cost_model
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.planner import Planner, compare
from pipebench.planner.plans import Comparison, Request
from pipebench.planner.predict import make_pipeline
from pipebench.profile.model import Profile
from pipebench.recipe import options
from pipebench.recipe.schema import Recipe, TrainRecipe
from pipebench.sampling import Sampler, microbatch_sizes, mix, name_hash, seed_default_generator
from pipebench.schedule.pipeline import Pipeline
from zoo.registry import Dataset


@dataclass(frozen=True)
class Prepared:
    """A recipe, ready to run.

    Attributes:
        recipe: the recipe.
        cluster: the cluster, with as many servers as the recipe asks for.
        profile: layer costs at every size that travels.
        setup: what the engine takes.
        comparison: the modes that were compared, if the recipe left the mode to the planner.
    """

    recipe: Recipe
    cluster: Cluster
    profile: Profile
    setup: Setup
    comparison: Comparison | None = None


def prepare(recipe: Recipe, cluster: Cluster, on_progress: Callable[[int, int], None] | None = None) -> Prepared:
    """Make a recipe ready to run.

    Args:
        recipe: a validated recipe.
        cluster: the cluster it names.
        on_progress: told of (layers profiled, layers to profile).

    Raises:
        PlanError, GraphError, ProfileError: what the model turns out not to allow.
    """
    known = profiled(recipe, cluster, on_progress)
    dataset, graph, profile = known.dataset, known.graph, known.profile
    sampler = Sampler(dataset.num_train, recipe.train.minibatch_size, recipe.train.seed)
    comparison = None
    if recipe.parallelism.mode == AUTO:
        comparison = compare(plan_request(recipe, cluster, profile, dataset), None)
        recipe = replace(recipe, parallelism=replace(recipe.parallelism, mode=comparison.best.mode))
    mode = resolve(recipe.parallelism)
    plan, devices, depth = choose_plan(recipe, cluster, graph, profile, dataset)
    pipeline = make_pipeline(
        plan,
        next(iter(profile.layers.values())),
        mode,
        depth=depth,
        microbatches=recipe.parallelism.microbatches if mode.microbatches else 1,
        accumulate=recipe.parallelism.accumulate,
        shares_norm=recipe.train.optimizer.clip_norm is not None and mode.flushes and len(plan.stages) > 1,
    )
    setup = Setup(
        graph=graph,
        plan=plan,
        pipeline=pipeline,
        costs=stage_costs(profile, plan, recompute=mode.recompute),
        cluster=cluster.placed(devices),
        dataset=dataset,
        sampler=sampler,
        make_optimizer=partial(make_optimizer, recipe.train.optimizer),
        lr=learning_rate(recipe.train, pipeline, dataset.num_train),
        weights=mode.weights,
        recompute=mode.recompute,
        clip_norm=recipe.train.optimizer.clip_norm,
        seed=recipe.train.seed,
        device=known.device,
    )
    return Prepared(recipe, cluster, profile, setup, comparison)


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


@dataclass(frozen=True)
class Profiled:
    """A recipe's model, data and costs.

    Attributes:
        dataset: the data.
        graph: the layer graph, with its initial weights.
        device: where arithmetic happens.
        profile: layer costs at every size that travels.
    """

    dataset: Dataset
    graph: LayerGraph
    device: torch.device
    profile: Profile


def profiled(
    recipe: Recipe,
    cluster: Cluster,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    whole_minibatches: bool = False,
) -> Profiled:
    """Trace and profile a recipe's model.

    Args:
        recipe: a validated recipe.
        cluster: whose device the times are to be true for.
        on_progress: told of (layers profiled, layers to profile).
        whole_minibatches: profile whole minibatches too where only microbatches travel.

    Raises:
        GraphError, PlanError, ProfileError: the model can't be traced or profiled, or isn't fed by the data set.
    """
    device = choose_device(recipe.engine.device)
    dataset: Dataset = options.make_dataset(recipe.dataset)
    graph = trace(initial_model(recipe), list(recipe.model.get("leaves") or ()))
    if len(graph.inputs) != len(dataset.inputs):
        raise PlanError(
            f"the model reads {len(graph.inputs)} inputs ({', '.join(graph.inputs)}), "
            f"but dataset {recipe.dataset.get('name')} feeds {len(dataset.inputs)} ({', '.join(dataset.inputs)})"
        )
    sizes = travelling_sizes(recipe, dataset)
    if whole_minibatches:
        sizes = tuple(sorted({*sizes, min(recipe.train.minibatch_size, dataset.num_train)}))
    profile = profiles.profile_for(recipe, cluster, graph, dataset, sizes, device, on_progress)
    return Profiled(dataset, graph, device, profile)


def plan_request(recipe: Recipe, cluster: Cluster, profile: Profile, dataset: Dataset) -> Request:
    """Return what a recipe asks of the planner."""
    parallelism = recipe.parallelism
    return Request(
        profile=profile,
        cluster=cluster,
        model=find_cost_model(parallelism.cost_model),
        minibatch_size=min(recipe.train.minibatch_size, dataset.num_train),
        microbatches=parallelism.microbatches,
        accumulate=parallelism.accumulate,
        depth=None if parallelism.depth == AUTO else int(parallelism.depth),
        row=None if parallelism.mode == AUTO else resolve(parallelism),
    )


def choose_plan(
    recipe: Recipe, cluster: Cluster, graph: LayerGraph, profile: Profile, dataset: Dataset
) -> tuple[Plan, Sequence[int], int | None]:
    """Return the recipe's plan, the device of every worker, and the depth if it isn't NOAM.

    Raises:
        PlanError: the model, the cluster or its memory doesn't allow it.
    """
    parallelism = recipe.parallelism
    planner = Planner(plan_request(recipe, cluster, profile, dataset), parallelism.mode)
    mode = planner.mode
    if parallelism.plan == AUTO and mode.shape not in ("one", "one-stage"):
        found = planner.best()
        return make_plan(graph, found.starts, found.replicas), found.devices, found.depth
    replicas = parse_plan(parallelism.plan, mode, cluster.num_workers)
    depth = planner.request.depth
    if parallelism.cuts is not None:
        plan = explicit_plan(graph, parallelism.cuts, replicas)
    else:
        stages = plan_fixed(planner.work, planner.request.model, cluster, replicas)
        plan = make_plan(graph, [stage.start for stage in stages[1:]], replicas)
    return plan, range(sum(replicas)), depth


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
