"""`pipebench plan`: builds the planner's request from recipe, profile file and options, and prints the answer.

Without a recipe, plans under the papers' cost models may be cut anywhere in the graph, as in the papers. Other plans
are cut along the order of execution, so that an engine can run them.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from rich.console import Console

from pipebench.cli.json_output import print_json
from pipebench.cli.outputs import PNG, Output, is_picture_by, refuse_to_overwrite
from pipebench.cluster import Cluster, coarser
from pipebench.errors import PlanError, RecipeError, UserError
from pipebench.model.plan import make_plan, starts_of_cuts
from pipebench.model.plan_layers import form_of
from pipebench.planner.compare import compare, with_others
from pipebench.planner.cost_models import COST_MODELS, DEFAULT
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.planner.states import PlanningCache
from pipebench.profile.graph_txt import UNKNOWN_DEVICE
from pipebench.profile.load import load_profile, plain_name
from pipebench.profile.model import Profile
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.recipe.plan_file import is_our_plan, is_plan_file
from pipebench.recipe.schema import ParallelismRecipe, Recipe
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.notation import parse_plan
from pipebench.show.plan_answer import PlanFindings, plan_data
from pipebench.show.plan_report import print_modes, print_plan, print_plans
from pipebench.show.progress import preparing
from pipebench.show.terminal import standard_error, standard_output
from pipebench.train.profile_cache import ToPlan, to_plan
from pipebench.train.request import choose_slices, plan_request
from pipebench.zoo.registry import Dataset

_DIFFERS = 1.1  # a prediction of more than this times the bottleneck is explained


@dataclass(frozen=True)
class PlanOptions:
    """The options of `pipebench plan`; None if not given."""

    profile: str | None = None  # file
    cluster: str | None = None  # name or file
    servers: int | None = None  # components of the outermost level
    links: Cluster | None = None  # anonymous devices of `--levels`, `--memory` and `--latency`
    cost_model: str | None = None
    mode: str | None = None  # or `auto`
    minibatch_size: int | None = None  # samples per minibatch of a profile file
    out: Path | None = None  # file of the plan, for recipes to name
    picture: Path | None = None
    others: bool = True  # plan the other modes, too
    as_json: bool = False  # print JSON only


def with_options(loaded: LoadedRecipe, options: PlanOptions) -> LoadedRecipe:
    """Return a recipe with the options' cluster, profile and cost model."""
    recipe = loaded.recipe
    cluster, engine, parallelism = recipe.cluster, recipe.engine, recipe.parallelism
    if options.cluster is not None:
        # A path on the command line is relative to the working directory, not to the recipe.
        is_file = options.cluster.endswith((".yaml", ".yml")) and os.path.exists(options.cluster)
        cluster = replace(cluster, name=os.path.abspath(options.cluster) if is_file else options.cluster)
    if options.servers is not None:
        cluster = replace(cluster, servers=options.servers)
    if options.profile is not None:
        # With a folder in its path, a file is never taken for a keyword of engine.timing.
        engine = replace(
            engine, timing=options.profile if os.sep in options.profile else os.path.join(".", options.profile)
        )
    if options.cost_model is not None:
        parallelism = replace(parallelism, cost_model=options.cost_model)
    changed = replace(recipe, cluster=cluster, engine=engine, parallelism=parallelism)
    if cluster == recipe.cluster:
        return replace(loaded, recipe=changed)
    made = load_cluster(cluster.name, cluster.servers, loaded.path.parent, cluster.changes)
    tensor = parallelism.tensor
    with faults_of(loaded):
        made = made if tensor == AUTO else coarser(made, tensor)
    return replace(loaded, recipe=changed, cluster=made)


def plan(loaded: LoadedRecipe | None, options: PlanOptions) -> None:
    """Plan the requested mode, print and draw the plan, then plan the other modes.

    `loaded` is a recipe from `with_options`, or None for a profile file alone.

    Raises:
        UserError: profile or cluster is missing, or nothing fits in memory.
    """
    out = Output("--out", options.out, "a plan's file", is_our_plan)
    picture = Output(
        "--picture", options.picture, "a picture of a plan", lambda path: is_picture_by(_pictures().MADE_BY, path), PNG
    )
    refuse_to_overwrite((out, picture))
    began_s = time.perf_counter()
    cache = PlanningCache()
    answer = _of_recipe(loaded, options, cache) if loaded is not None else _of_file(options, cache)
    if not options.as_json:
        print_plan(answer, standard_output())
    form = form_of(answer.comparison.best.plan, answer.layer_names)
    out.write(lambda path: path.write_text(form.text(), encoding="utf-8"), _progress(options))
    picture.write(lambda path: _pictures().plan_figure(answer).write(path), _progress(options))
    everything = _with_others(answer, options, cache)
    everything = replace(everything, total_s=time.perf_counter() - began_s)
    if options.as_json:
        print_json(plan_data(everything))
    else:
        print_modes(everything, standard_output())


def findings(loaded: LoadedRecipe, *, others: bool) -> PlanFindings:
    """Return what `plan` prints about a recipe; with `others` also the best plans of the other modes."""
    began_s, cache = time.perf_counter(), PlanningCache()
    options = PlanOptions(others=others)
    answer = _with_others(_of_recipe(loaded, options, cache), options, cache)
    return replace(answer, total_s=time.perf_counter() - began_s)


def _pictures() -> ModuleType:
    from pipebench.show import plan_picture  # late: imports matplotlib, which few plans need

    return plan_picture


def plan_each(loaded: Sequence[LoadedRecipe], options: PlanOptions) -> None:
    """Plan every run of a sweep, recipes from `with_options`, and print the plans side by side.

    Raises:
        UserError: an option applies to one plan only, or no run has a plan.
    """
    for option, given in (("--out", options.out), ("--picture", options.picture)):
        if given is not None:
            raise UserError(f"{option} is for one plan, and the recipe makes {len(loaded)}: give one value per key")
    answers, refused = [], {}
    for each in loaded:
        cache = PlanningCache()
        try:
            answer = _of_recipe(each, options, cache)
            if options.as_json:  # the table has no room for other modes
                answer = _with_others(answer, options, cache)
            answers.append(replace(answer, name=each.varied_name))
        except RecipeError as error:
            refused[each.varied_name] = "; ".join(fault.problem for fault in error.faults)
            cause = error
    if not answers:
        raise cause
    if options.as_json:
        lacking = [{"name": name, "refused": why} for name, why in refused.items()]
        print_json([*map(plan_data, answers), *lacking])
    else:
        print_plans(answers, refused, standard_output())


def _of_recipe(loaded: LoadedRecipe, options: PlanOptions, cache: PlanningCache) -> PlanFindings:
    mode = options.mode or loaded.recipe.parallelism.mode
    with faults_of(loaded):
        loaded = _with_slices(loaded, options, mode)
        recipe, own = loaded.recipe, loaded.cluster
        parallelism = recipe.parallelism
        # If the recipe's own plan names layers, it is compared with the model's.
        names_layers = is_plan_file(parallelism.plan) or parallelism.cuts is not None
        with preparing(recipe.name, _progress(options)) as on_progress:
            known = to_plan(loaded, on_progress, needs_graph=names_layers)
        cluster = own if options.links is None else replace(options.links, device=own.device)
        if parallelism.tensor != 1:
            cluster = own  # `_with_slices` has made it of `options.links`
        request = plan_request(recipe, cluster, known.profile, known.dataset)
        if mode != parallelism.mode:
            request = replace(request, row=None)
        answer = _answer(recipe.name, request, mode, options, cache, says_samples=True)
        if request.row is not None:
            answer = replace(answer, given=_given(parallelism, known, request, mode))
    return answer


def _with_slices(loaded: LoadedRecipe, options: PlanOptions, mode: str) -> LoadedRecipe:
    """Return a recipe with sliced layers on the given links, and with the fastest number of slices for `auto`."""
    tensor = loaded.recipe.parallelism.tensor
    if tensor == 1:
        return loaded
    if options.links is not None:
        given = replace(options.links, device=loaded.cluster.device)
        loaded = replace(loaded, cluster=given if tensor == AUTO else coarser(given, tensor))

    def profiled(recipe: Recipe, cluster: Cluster) -> tuple[Profile, Dataset]:
        known = to_plan(replace(loaded, recipe=recipe, cluster=cluster))
        return known.profile, known.dataset

    recipe, cluster = choose_slices(loaded.recipe, loaded.cluster, profiled, mode)
    return replace(loaded, recipe=recipe, cluster=cluster)


def _given(parallelism: ParallelismRecipe, known: ToPlan, request: Request, mode: str) -> PlanEstimate | None:
    """Return the recipe's own plan; None if it has none, or one for another number of workers."""
    planner, cluster = Planner(request, mode), request.cluster
    if is_plan_file(parallelism.plan):
        from pipebench.train.plan import plan_of_file  # late: imports torch

        assert known.graph is not None
        plan = plan_of_file(parallelism, cluster.num_workers, known.graph, request.streams, ties=planner.ties)
        return planner.estimate_of(plan)
    if parallelism.cuts is None and parallelism.plan == AUTO:
        return None
    try:
        replicas = parse_plan(parallelism.plan, planner.mode, cluster.num_workers)
    except PlanError:  # --cluster and --levels may have changed it
        return None
    # A plan of one stage can differ from the planner's only in its cuts and its number of workers.
    is_whole = planner.mode.is_one_stage and parallelism.cuts is None
    if is_whole and replicas == parse_plan(AUTO, planner.mode, cluster.num_workers):
        return None
    starts = None
    if parallelism.cuts is not None:
        assert known.graph is not None
        starts, chunks = starts_of_cuts(known.graph, parallelism.cuts), planner.mode.chunks
        # Raises if a run would refuse the cuts.
        make_plan(known.graph, starts, replicas * chunks, chunks=chunks, ties=planner.ties)
    return planner.for_replicas(replicas, starts)


def _progress(options: PlanOptions) -> Console | None:
    return standard_error() if options.as_json else None


def _of_file(options: PlanOptions, cache: PlanningCache) -> PlanFindings:
    assert options.profile is not None
    given = options.minibatch_size
    profile = load_profile(options.profile, given or 1)
    says_samples = given is not None or profile.device != UNKNOWN_DEVICE or {*profile.layers} != {1}
    size = given or max(profile.layers)
    if size not in profile.layers:
        sizes = ", ".join(map(str, sorted(profile.layers)))
        raise UserError(f"--minibatch-size: got {size}, allowed are the sizes in {options.profile}: {sizes}")
    if not says_samples:
        profile = replace(profile, note=profile.note.replace(" (taken as 1)", ""))
    if options.links is not None:
        device = options.links.device if profile.device == UNKNOWN_DEVICE else profile.device
        cluster = replace(options.links, device=device)
    else:
        assert options.cluster is not None
        cluster = load_cluster(options.cluster, options.servers or 1)
    model = COST_MODELS[options.cost_model or DEFAULT]
    request = Request(profile, cluster, model, size, runnable=False)
    name = plain_name(Path(options.profile))
    return _answer(name, request, options.mode or "pipedream", options, cache, says_samples=says_samples)


def _answer(
    name: str, request: Request, mode: str, options: PlanOptions, cache: PlanningCache, *, says_samples: bool
) -> PlanFindings:
    """Return the plan of the requested mode alone."""
    if mode == AUTO and not options.others:
        raise UserError("--no-others goes with one mode: auto plans them all, to find the fastest")
    with preparing(name, _progress(options), work="planning") as on_search:
        comparison = compare(request, None if mode == AUTO else mode, others=False, cache=cache, on_search=on_search)
    best = comparison.best
    asked = request if best.plan.mode == mode else replace(request, row=None)
    row = best.chosen(asked.row or MODES[best.plan.mode])
    planner = Planner(replace(asked, row=row) if best.choices else asked, best.plan.mode)
    waits = best.is_simulated and best.minibatch_s > _DIFFERS * best.bottleneck_s
    spare_s = _one_deeper_s(planner, best) if waits and not row.flush and len(best.stages) > 1 else None
    times, over_memory = planner.times_of(best), planner.keeping(best.plan.memory).peaks_over_memory(best)
    return PlanFindings(name, request, row, comparison, says_samples, spare_s, times, over_memory)


def _one_deeper_s(planner: Planner, best: PlanEstimate) -> float | None:
    """Return a plan's seconds per minibatch with one more minibatch in flight; None if an update has too few."""
    depth = best.plan.depth + 1
    accumulate = planner.accumulated(depth)
    if planner.weights.accumulates and accumulate < depth:
        return None
    deeper = replace(best, plan=replace(best.plan, depth=depth), accumulate=accumulate, is_simulated=False)
    return planner.with_prediction(deeper).minibatch_s


def _with_others(answer: PlanFindings, options: PlanOptions, cache: PlanningCache) -> PlanFindings:
    """Return an answer with the best plans of the other modes, if they are requested."""
    if not options.others:
        return answer
    with preparing(answer.name, _progress(options), work="planning") as on_search:
        return replace(answer, comparison=with_others(answer.request, answer.comparison, cache, on_search))
