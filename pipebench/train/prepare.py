"""From a recipe to a job: model, data, profile, plan, pipeline, costs, and from these the engine's setup.

Every step is a function of the results before it, so each can be called, printed and tested alone.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.errors import Fault, PlanError, RecipeError, choice
from pipebench.hooks import hooks
from pipebench.model.graph import LayerGraph
from pipebench.model.optimizer import called, is_elementwise, keeps_averages, knows_slices, make_optimizer
from pipebench.model.plan import Plan
from pipebench.model.slice_modules import SliceGroup
from pipebench.planner.memo import compared
from pipebench.planner.plans import Comparison
from pipebench.planner.predict import PlannedWorkload, make_pipeline, with_sums
from pipebench.profile.choose import is_measured
from pipebench.profile.model import Profile
from pipebench.recipe.draft import turned_on
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.schema import LARGEST, LossScaleRecipe, OptimizerRecipe, Recipe, TrainRecipe
from pipebench.schedule.modes import AUTO, KEEP, MODES
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.syncs import ALL_REDUCE, NOT_SHARDED, SYNCS
from pipebench.schedule.weights import CORRECTION_DECAY, update_costs
from pipebench.simulate.costs import HostCosts, stage_costs
from pipebench.simulate.evaluation import evaluation_of
from pipebench.simulate.memory import stage_memories
from pipebench.train.job import Decision, Job, JobExtension
from pipebench.train.largest import with_largest_update
from pipebench.train.learning_rate import learning_rate
from pipebench.train.plan import ANEW, as_planned, check_copies, choose_plan, recorded_plan, with_shard
from pipebench.train.profiled_model import ProfiledModel, Wanted, input_bytes, profile_model
from pipebench.train.request import (
    choose_slices,
    may_tie,
    plan_request,
    samplers,
    scales,
    shares_norm,
    sliced,
    value_at,
    with_device_memory,
)
from pipebench.zoo.registry import Dataset


def prepare(
    recipe: Recipe,
    cluster: Cluster,
    on_progress: Callable[[str], None] | None = None,
    *,
    trains: bool = True,
    decision: Decision | None = None,
    measure_again: Callable[[ProfiledModel, Profile], Profile] | None = None,
    whole_only: bool = False,
    group: SliceGroup | None = None,
) -> Job:
    """Make a validated recipe ready to run on its cluster.

    `on_progress` gets what is profiled, in words. Without `trains` there are no weights. `decision` has an earlier plan
    and profile. `measure_again` returns the profile for costs, if it isn't the plan's. For the others see `Wanted`.

    Raises:
        PlanError, GraphError, ProfileError: impossible with this model.
    """
    began_s, trains = time.perf_counter(), trains and engine_kind(recipe).trains
    if decision is not None and recipe.parallelism.tensor == AUTO:
        recipe, cluster = sliced(recipe, cluster, decision.profile.slices)
    recipe, cluster = choose_slices(recipe, cluster, _profiled)
    parts = hooks("prepare", turned_on(partial(value_at, recipe)))
    whole_only |= not trains and any(part.profiles_often for part in parts.values())
    wanted = Wanted(trains, None if decision is None else decision.profile, whole_only=whole_only, group=group)
    whole = profile_model(recipe, cluster, on_progress, wanted)
    cluster = with_device_memory(recipe, cluster, whole.profile)
    known, extensions = _extended(recipe, cluster, whole, parts)
    recipe, plan, comparison = _planned(recipe, cluster, known, decision)
    recipe, chosen = as_planned(recipe, plan)
    check_copies(cluster, plan)
    _check_compiled(recipe, known.graph, plan)
    if measure_again is not None:
        whole = replace(whole, profile=measure_again(whole, whole.profile))
        known, extensions = _extended(recipe, cluster, whole, parts)
    setup = _setup(recipe, cluster, known, plan, switches=any(each.switches for each in extensions.values()))
    _check_training(recipe, setup)
    extensions = {name: each.prepared(setup) for name, each in extensions.items()}
    return Job(recipe, cluster, setup, comparison, known.left_over, extensions, whole.profile, began_s, chosen)


def _profiled(recipe: Recipe, cluster: Cluster) -> tuple[Profile, Dataset]:
    """Return a recipe's profile, at the sizes that planning needs, and its data."""
    known = profile_model(recipe, cluster, wanted=Wanted(plans=True))
    return known.profile, known.dataset


def _extended(
    recipe: Recipe, cluster: Cluster, whole: ProfiledModel, parts: Mapping[str, type[JobExtension]]
) -> tuple[ProfiledModel, dict[str, JobExtension]]:
    """Return the model that the run begins with, and extensions' parts in the job, by name."""
    extensions = {name: part.of(recipe, cluster, whole) for name, part in parts.items()}
    known = whole
    for each in extensions.values():
        known = each.profiled(known)
    return known, extensions


def _planned(
    recipe: Recipe, cluster: Cluster, known: ProfiledModel, decision: Decision | None
) -> tuple[Recipe, Plan, Comparison | None]:
    """Return a recipe with a resolved mode, its plan, and the comparison of modes, if any."""
    asked, comparison = recipe.parallelism, None
    if decision is None:
        if asked.mode == AUTO:
            comparison = compared(plan_request(recipe, cluster, known.profile, known.dataset))
            recipe = _in_mode(recipe, comparison.best.plan.mode)
        return recipe, choose_plan(recipe, cluster, known.graph, known.profile, known.dataset), comparison
    if asked.mode == AUTO:
        if decision.plan.mode not in MODES:
            raise RecipeError([Fault(decision.source, "mode", f"{choice(decision.plan.mode[:60], MODES)}; {ANEW}")])
        recipe = _in_mode(recipe, decision.plan.mode)
    recipe = with_shard(recipe, decision.plan.shard, decision.source)
    asked, streams = recipe.parallelism, samplers(recipe.train, known.dataset)[0].streams
    plan = recorded_plan(decision, asked, cluster.num_workers, known.graph, streams, ties=may_tie(recipe))
    return recipe, plan, None


def _in_mode(recipe: Recipe, mode: str) -> Recipe:
    """Return a recipe of mode auto with the mode that was chosen."""
    microbatches = recipe.parallelism.microbatches if MODES[mode].takes_microbatches() else 1
    return replace(recipe, parallelism=replace(recipe.parallelism, mode=mode, microbatches=microbatches))


def _setup(recipe: Recipe, cluster: Cluster, known: ProfiledModel, plan: Plan, *, switches: bool) -> Setup:
    """Return the engine's setup for a recipe with a resolved mode; `switches`: an extension may change it at drains."""
    train, parallelism = recipe.train, recipe.parallelism
    graph, dataset, profile = known.graph, known.dataset, known.profile
    sampler, held_out = samplers(train, dataset)
    cluster = cluster.for_stages(len(plan.positions))
    pipeline = _pipeline(recipe, cluster, profile, plan)
    costs = stage_costs(profile, plan, update_costs(pipeline), sharded=pipeline.is_sharded)
    if is_measured(recipe, cluster) and known.device.type == "cpu":
        costs = replace(costs, host=HostCosts(fetches=dataset.loader_processes == 0))
    if parallelism.accumulate == LARGEST:
        memories = stage_memories(profile, plan, pipeline, input_bytes(graph, dataset, profile.by_size))
        pipeline = with_largest_update(PlannedWorkload(pipeline, costs, cluster, plan.devices, sampler), memories)
    return Setup(
        graph=graph,
        plan=plan,
        pipeline=pipeline,
        profile=profile,
        costs=costs,
        evaluation=evaluation_of(graph, plan, pipeline, profile, dataset),
        cluster=cluster,
        dataset=dataset,
        sampler=sampler,
        held_out=held_out,
        make_optimizer=partial(make_optimizer, train.optimizer),
        lr=learning_rate(train, pipeline, sampler.num_samples, parallelism.annealing_epochs),
        clip_norm=train.optimizer.clip_norm,
        seed=train.seed,
        device=known.device,
        loss_scale=(train.loss_scale or LossScaleRecipe()) if scales(train) else None,
        correction_decay=parallelism.correction_decay or CORRECTION_DECAY,
        steps_on_whole=not is_elementwise(train.optimizer),
        repartitions=switches,
        compiled=recipe.engine.compile,
        channels_last=recipe.engine.channels_last,
    )


def _pipeline(recipe: Recipe, cluster: Cluster, profile: Profile, plan: Plan) -> Pipeline:
    """Return a plan's pipeline in a recipe's mode, with its extensions."""
    mode = with_sums(recipe.parallelism.row, cluster, plan)
    pipeline = make_pipeline(
        plan,
        profile.rows,
        mode,
        microbatches=recipe.parallelism.microbatches,
        accumulate=mode.accumulate,
        shares_norm=shares_norm(recipe.train),
    )
    on = turned_on(partial(value_at, recipe))
    settings = hooks("settings", on)
    given = {name: settings[name](recipe, pipeline) if name in settings else value_at(recipe, name) for name in on}
    return replace(pipeline, extensions=given)


def _check_compiled(recipe: Recipe, graph: LayerGraph, plan: Plan) -> None:
    """Raise a PlanError for a plan's file that recomputes or swaps layers of compiled stages."""
    pairs = zip(graph.layers, plan.memory, strict=True)
    other = next(((layer.name, policy) for layer, policy in pairs if policy != KEEP), None)
    if recipe.engine.compile and other is not None:
        raise PlanError(
            f"engine.compile: got true with a plan that says {other[1]} for layer {other[0]}, and a compiled stage "
            f"keeps what its own backward reads; set engine.compile: false, or {KEEP} for all layers"
        )


def _check_training(recipe: Recipe, setup: Setup) -> None:
    """Raise a PlanError for what the recipe's optimizer and precision can't do under the plan."""
    _check_scaling(recipe.train, setup.graph, setup.plan, setup.pipeline)
    _check_slices(recipe, setup)
    _check_averages(recipe.train.optimizer, setup.pipeline)


def _check_scaling(train: TrainRecipe, graph: LayerGraph, plan: Plan, pipeline: Pipeline) -> None:
    """Raise a PlanError for stages that can't have a loss scale of their own, as they have without a flush.

    In a stage without parameters no overflow would show; the copies of tied weights would get different gradients.
    """
    if not scales(train) or pipeline.flushes:
        return
    for stages in pipeline.ties:
        raise PlanError(
            f"stages {' and '.join(map(str, stages))} share a weight, and without a flush train.precision fp16 scales "
            "the gradients of each stage differently; use train.precision bf16, a mode with a flush, or move "
            "parallelism.cuts"
        )
    for index, stage in enumerate(plan.stages):
        layers = graph.layers[stage.start : stage.stop]
        if not any(layer.parameters for layer in layers):
            raise PlanError(
                f"stage {index} ({layers[0].name} to {layers[-1].name}) has no parameters, and without a flush "
                "train.precision fp16 scales the gradients of each stage by what those of its parameters are; "
                "move parallelism.cuts or use fewer stages"
            )


def _check_slices(recipe: Recipe, setup: Setup) -> None:
    """Raise a PlanError for what processes with slices of layers can't do."""
    slices, optimizer, pipeline = recipe.parallelism.tensor, recipe.train.optimizer, setup.pipeline
    if slices == 1 or not engine_kind(recipe).in_processes:
        return
    got = f"parallelism.tensor: got {slices} with engine {recipe.engine.kind}"
    if not SYNCS[pipeline.sync].waits:
        raise PlanError(
            f"{got} and sync {pipeline.sync}, whose updates every slice would make in an order of its own: allowed is "
            f"1, or sync: {ALL_REDUCE}"
        )
    if setup.repartitions:
        raise PlanError(f"{got}, which can't move layers in slices: allowed is 1, or no moves in parallelism.vpipe")
    if not is_elementwise(optimizer) and (pipeline.is_sharded or not knows_slices(optimizer)):
        beside = f" and shard {pipeline.shard}" if pipeline.is_sharded else ""
        raise PlanError(
            f"{got}{beside}, whose processes have pieces of the tensors that {called(optimizer)} adapts whole steps "
            f"to: allowed is 1, or an optimizer that steps element by element{'' if beside else ', or lars or lamb'}"
        )


def _check_averages(optimizer: OptimizerRecipe, pipeline: Pipeline) -> None:
    """Raise a PlanError for a user's optimizer that averages sharded parameters; named ones are checked in recipes."""
    if pipeline.is_sharded and optimizer.target is not None and keeps_averages(optimizer):
        raise PlanError(
            f"train.optimizer.target: got {optimizer.target} with shard {pipeline.shard}, and evaluations need its "
            f"averages of all parameters: allowed are others, or parallelism.shard: {NOT_SHARDED}"
        )
