"""Whether a plan that a run's folder keeps is one that the run's recipe could have been given."""

from pipebench.model.graph import LayerGraph
from pipebench.model.plan import Plan, starts_of_cuts
from pipebench.model.plan_layers import layer_problems, plan_of, refuse
from pipebench.recipe.plan_file import PlanForm, Problems, form_problems, is_plan_file, load_plan
from pipebench.recipe.schema import ParallelismRecipe
from pipebench.schedule.modes import AUTO
from pipebench.schedule.notation import format_plan, parse_plan, streams_problem
from pipebench.schedule.pipeline import MOST_BEYOND_NOAM, noam

ANEW = "remove the file to have it decided anew"


def kept_plan(
    form: PlanForm,
    source: str,
    parallelism: ParallelismRecipe,
    num_workers: int,
    graph: LayerGraph,
    streams: int | None,
) -> Plan:
    """Return a plan that was kept.

    Args:
        form: the plan.
        source: its file.
        parallelism: what the recipe asks for, its mode resolved.
        num_workers: devices of the cluster.
        graph: the model.
        streams: of a text, which replicas take turns with.

    Raises:
        RecipeError: with everything that is wrong with it.
    """
    refuse(source, [*form_problems(form, parallelism, num_workers), *layer_problems(form, graph)], f"; {ANEW}")
    refuse(source, _other_than_asked(form, parallelism, num_workers, graph, streams), f"; {ANEW}")
    return plan_of(form, graph, relay=parallelism.relay)


def _other_than_asked(
    form: PlanForm, parallelism: ParallelismRecipe, num_workers: int, graph: LayerGraph, streams: int | None
) -> Problems:
    """Yield where a plan that would run isn't what the recipe asks for."""
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
