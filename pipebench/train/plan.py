"""The plan of a recipe: the planner's, one written out, a file's, or the one in a run's folder."""

from dataclasses import replace
from typing import Any

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.model.graph import LayerGraph
from pipebench.model.plan import Plan, make_plan, recut, starts_of_cuts
from pipebench.model.plan_layers import layer_problems, plan_of, refuse
from pipebench.planner.memo import arranged, best_plan
from pipebench.planner.mode_request import UnitsInFlight
from pipebench.profile.model import Profile
from pipebench.recipe.plan_file import PlanForm, Problems, form_problems, is_plan_file, load_plan
from pipebench.recipe.schema import ParallelismRecipe, Recipe
from pipebench.recipe.suited import unshared
from pipebench.schedule.modes import AUTO, RECOMPUTE, SWAP
from pipebench.schedule.notation import format_plan, parse_plan, streams_problem
from pipebench.schedule.pipeline import MOST_BEYOND_NOAM, noam
from pipebench.schedule.placement import places
from pipebench.train.job import Decision
from pipebench.train.request import asks_of_layers, may_tie, plan_request
from pipebench.zoo.registry import Dataset

ANEW = "remove the file to have it decided anew"


def choose_plan(recipe: Recipe, cluster: Cluster, graph: LayerGraph, profile: Profile, dataset: Dataset) -> Plan:
    """Return the recipe's plan.

    What the planner chose besides cuts and replicas is in the plan, too; `as_planned` writes it into the recipe.

    Raises:
        PlanError: model, cluster or memory make it impossible.
    """
    parallelism, request = recipe.parallelism, plan_request(recipe, cluster, profile, dataset)
    planner = UnitsInFlight(request, parallelism.mode)
    mode = planner.mode
    if parallelism.plan == AUTO and not mode.is_one_stage:
        plan = best_plan(request, parallelism.mode).plan
        return recut(graph, plan, plan.starts)  # the same cuts; but a stage's buffers are known from the graph only
    if is_plan_file(parallelism.plan):
        recipe = with_shard(recipe, load_plan(parallelism.plan).shard, parallelism.plan)
        return plan_of_file(recipe.parallelism, cluster.num_workers, graph, request.streams, ties=may_tie(recipe))
    replicas = parse_plan(parallelism.plan, mode, cluster.num_workers)
    problem = streams_problem(replicas, request.streams)
    if problem is not None:
        raise PlanError(f"train.streams: got {problem}")
    given = None if parallelism.cuts is None else starts_of_cuts(graph, parallelism.cuts)
    starts, memory, devices = arranged(request, parallelism.mode, replicas, given)
    replicas_of_stages = replicas * mode.chunks
    plan = make_plan(
        graph,
        starts,
        replicas_of_stages,
        mode=parallelism.mode,
        devices=places(mode.order, replicas_of_stages, mode.chunks),
        depth=mode.depth or request.depth,
        chunks=mode.chunks,
        memory=memory,
        relay=parallelism.relay,
        ties=planner.ties,
    )
    return plan.on(devices)


def with_shard(recipe: Recipe, shard: str | None, source: str) -> Recipe:
    """Return a recipe with the `shard` of a plan's file, `source`, unless the recipe has one itself.

    Raises:
        PlanError: the recipe's training can't be sharded.
    """
    parallelism = recipe.parallelism
    if shard in (None, parallelism.row.shard) or parallelism.shard is not None:
        return recipe
    why = unshared(recipe, parallelism.row)
    if why is not None:
        raise PlanError(f"{source}: shard: got {shard}, allowed is none: {why}")
    return replace(recipe, parallelism=replace(parallelism, shard=shard))


def as_planned(recipe: Recipe, plan: Plan) -> tuple[Recipe, str]:
    """Write what the planner chose to fit in memory, shards and recomputation, into a recipe.

    Returns:
        The recipe, and the keys set as text, "" if none is.
    """
    parallelism, is_file = recipe.parallelism, is_plan_file(recipe.parallelism.plan)
    chosen: dict[str, Any] = {}
    if plan.shard is not None:
        chosen["shard"] = plan.shard
    recomputes = any(RECOMPUTE in stage.memory for stage in plan.stages)
    if recomputes and not (parallelism.row.recompute or asks_of_layers(parallelism) or is_file):
        chosen["recompute"] = True
    words = ", ".join(f"{name}: {'true' if value is True else value}" for name, value in chosen.items())
    return replace(recipe, parallelism=replace(parallelism, **chosen)), "" if is_file else words


def plan_of_file(
    parallelism: ParallelismRecipe, num_workers: int, graph: LayerGraph, streams: int | None, *, ties: bool
) -> Plan:
    """Return the plan of the recipe's file.

    Args:
        parallelism: the recipe's section.
        num_workers: of the cluster.
        graph: the model's layers.
        streams: of a text, which replicas divide among themselves; None for other data.
        ties: whether stages may have copies of shared weights, as in `Plan`.

    Raises:
        RecipeError: lists all problems.
    """
    form = load_plan(parallelism.plan)
    problems = [*form_problems(form, parallelism, num_workers)]
    problem = streams_problem(form.replicas, streams)
    if problem is not None:
        problems.append(("stages", f"train.streams is {problem}"))
    refuse(parallelism.plan, [*problems, *layer_problems(form, graph, ties=ties)])
    return plan_of(form, graph, relay=parallelism.relay, ties=ties)


def recorded_plan(
    decision: Decision,
    parallelism: ParallelismRecipe,
    num_workers: int,
    graph: LayerGraph,
    streams: int | None,
    *,
    ties: bool,
) -> Plan:
    """Return the plan of an earlier decision, if the recipe, in its resolved mode, allows it.

    For the other arguments see `plan_of_file`.

    Raises:
        RecipeError: lists all problems.
    """
    form, source = decision.plan, decision.source
    problems = [*form_problems(form, parallelism, num_workers), *layer_problems(form, graph, ties=ties)]
    refuse(source, problems, f"; {ANEW}")
    refuse(source, _other_than_asked(form, parallelism, num_workers, graph, streams), f"; {ANEW}")
    return plan_of(form, graph, relay=parallelism.relay, ties=ties)


def _other_than_asked(
    form: PlanForm, parallelism: ParallelismRecipe, num_workers: int, graph: LayerGraph, streams: int | None
) -> Problems:
    """Yield where a valid plan differs from the recipe."""
    mode, given, written = parallelism.row, parallelism.plan, format_plan(form.replicas)
    problem = streams_problem(form.replicas, streams)
    if problem is not None:
        yield "stages", f"got {written}, and train.streams is {problem}"
    if is_plan_file(given):
        if form != load_plan(given):
            yield "stages", f"isn't the plan of {given}, which the recipe names"
        return
    deepest = noam(form.replicas) + (MOST_BEYOND_NOAM if given == AUTO else 0)
    if mode.depth is None and parallelism.depth == AUTO and form.depth > deepest:
        yield "depth", f"got {form.depth}, allowed is a whole number from 1 to {deepest}"
    asked = form.replicas if given == AUTO else parse_plan(given, mode, num_workers)
    if form.replicas != asked:
        yield "stages", f"got {written}, allowed is {format_plan(asked)}, the recipe's plan"
    elif parallelism.cuts is not None:
        cuts = [graph.layers[start].name for start in starts_of_cuts(graph, parallelism.cuts)]
        starts = [next(iter(stage.layers)) for stage in form.stages[1:]]
        if starts != cuts:
            yield "stages", f"got {starts} as first layers of the later stages, allowed are the recipe's cuts, {cuts}"


def check_copies(cluster: Cluster, plan: Plan, where: str = "parallelism") -> None:
    """Raise a PlanError if layers swap and the cluster's copy rate is unknown; `where` is the key that makes them."""
    stages = [str(index) for index, stage in enumerate(plan.stages) if SWAP in stage.memory]
    if stages and cluster.pcie_bytes_per_s is None:
        raise PlanError(
            f"{where}: layers of stage{'s' * (len(stages) > 1)} {', '.join(stages)} swap, and cluster {cluster.name} "
            "doesn't say how fast a device copies to its host: add to its file, e.g., "
            'pcie: {value: 15.76 GB/s, assumed: "PCIe 3.0 x16"}'
        )
