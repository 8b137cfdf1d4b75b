"""The plan of a recipe: the planner's, one that the recipe writes out, or a file's."""

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.model.graph import LayerGraph
from pipebench.model.plan import Plan, make_plan, recut, starts_of_cuts
from pipebench.model.plan_layers import layer_problems, plan_of, refuse
from pipebench.planner.planner import Planner
from pipebench.profile.model import Profile
from pipebench.recipe.plan_file import form_problems, is_plan_file, load_plan
from pipebench.recipe.schema import ParallelismRecipe, Recipe
from pipebench.schedule.modes import AUTO
from pipebench.schedule.notation import parse_plan, streams_problem
from pipebench.train.request import plan_request
from zoo.registry import Dataset


def choose_plan(recipe: Recipe, cluster: Cluster, graph: LayerGraph, profile: Profile, dataset: Dataset) -> Plan:
    """Return the recipe's plan.

    Raises:
        PlanError: the model, the cluster or its memory doesn't allow it.
    """
    parallelism = recipe.parallelism
    planner = Planner(plan_request(recipe, cluster, profile, dataset), parallelism.mode)
    mode = planner.mode
    if parallelism.plan == AUTO and mode.shape not in ("one", "one-stage"):
        return _over(graph, planner.best().plan)
    if is_plan_file(parallelism.plan):
        return plan_of_file(parallelism, cluster.num_workers, graph, planner.request.streams)
    replicas = parse_plan(parallelism.plan, mode, cluster.num_workers)
    problem = streams_problem(replicas, planner.request.streams)
    if problem is not None:
        raise PlanError(f"train.streams: got {problem}")
    cuts = parallelism.cuts
    starts = planner.starts_of(replicas) if cuts is None else starts_of_cuts(graph, cuts)
    plan = make_plan(
        graph,
        starts,
        replicas * mode.chunks,
        mode=parallelism.mode,
        depth=mode.depth or planner.request.depth,
        chunks=mode.chunks,
        memory=planner.policies_of(replicas * mode.chunks, starts),
        relay=parallelism.relay,
    )
    return plan.on(planner.devices_of(replicas, starts))


def plan_of_file(parallelism: ParallelismRecipe, num_workers: int, graph: LayerGraph, streams: int | None) -> Plan:
    """Return the plan of the file that a recipe names.

    Raises:
        RecipeError: with everything that is wrong with it.
    """
    form = load_plan(parallelism.plan)
    problems = [*form_problems(form, parallelism, num_workers)]
    problem = streams_problem(form.replicas, streams)
    if problem is not None:
        problems.append(("stages", f"train.streams is {problem}"))
    refuse(parallelism.plan, [*problems, *layer_problems(form, graph)])
    return plan_of(form, graph, relay=parallelism.relay)


def _over(graph: LayerGraph, plan: Plan) -> Plan:
    """Return a plan of a profile's layers as one of the graph's, which are as many; the graph knows buffers, too."""
    return recut(graph, plan, [stage.start for stage in plan.stages[1:]])
