"""`pipebench plan`: what is asked of the planner, put together from a recipe, a profile file and options.

Without a recipe a plan may cut between any layers, as the papers' planners do; with one it is a plan that runs.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from pipebench import profile as profiles
from pipebench.cli.profiling import plain_name
from pipebench.cluster import Cluster, Level
from pipebench.errors import Fault, GraphError, PlanError, ProfileError, RecipeError, UserError, choice
from pipebench.files import replace as replace_file
from pipebench.model.graph import LayerGraph
from pipebench.model.plan import starts_of_cuts
from pipebench.model.plan_layers import form_of
from pipebench.planner.compare import compare
from pipebench.planner.cost_models import COST_MODELS, DEFAULT
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.profile.graph_txt import UNKNOWN_DEVICE
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.recipe.parallelism import resolve
from pipebench.recipe.plan_file import is_our_plan, is_plan_file
from pipebench.recipe.schema import ParallelismRecipe
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.notation import parse_plan
from pipebench.show.console import preparing, print_written, standard_error, standard_output
from pipebench.show.plan_picture import draw_plan, is_our_picture
from pipebench.show.plan_report import Answer, plan_json, print_plan
from pipebench.show.progress import searching
from pipebench.train.prepare import plan_of_file, plan_request, profiled
from pipebench.units import UnitError, parse_bandwidth, parse_bytes, parse_duration

_T = TypeVar("_T")

MOST_WORKERS = 1 << 20  # on --levels: where planning still takes seconds
_MOST_LEVELS = 8
_LONGEST_TEXT = 60
_DIFFERS = 1.1  # a prediction this many times the bottleneck asks for an explanation
_LEVELS_FORM = "is N@BYTES_PER_S for every level, innermost first, joined by commas, such as 4@1e10,4@1.25e9"


@dataclass(frozen=True)
class Asked:
    """The options of `pipebench plan`, as given; None where they weren't.

    Attributes:
        profile: a profile file.
        cluster, servers: a cluster and how many components of its outermost level.
        levels: a cluster as text: `4@1e10,4@1.25e9`.
        memory, latency: of the devices and links of `levels`.
        cost_model: its name.
        mode: whose plan is wanted, or `auto`.
        minibatch_size: samples per minibatch of a profile file.
        shapes: also plan shapes of stages that no mode here has.
        out: where the plan goes, as a file that a recipe can name.
        picture: where the picture goes.
        as_json: print JSON and nothing else.
    """

    profile: str | None = None
    cluster: str | None = None
    servers: str | None = None
    levels: str | None = None
    memory: str | None = None
    latency: str | None = None
    cost_model: str | None = None
    mode: str | None = None
    minibatch_size: str | None = None
    shapes: bool = False
    out: str | None = None
    picture: str | None = None
    as_json: bool = False


def check(asked: Asked, *, with_recipe: bool) -> None:
    """Check the options before any work starts.

    Raises:
        UserError: one of them can't be taken, or two don't go together.
    """
    if asked.cost_model is not None and asked.cost_model not in COST_MODELS:
        raise UserError(f"--cost-model: {choice(asked.cost_model[:_LONGEST_TEXT], COST_MODELS)}")
    if asked.mode is not None and asked.mode not in (*MODES, AUTO):
        raise UserError(f"--mode: {choice(asked.mode[:_LONGEST_TEXT], (*MODES, AUTO))}")
    if asked.cluster is not None and asked.levels is not None:
        raise UserError("--cluster and --levels both say where to run; give one of the two")
    if asked.servers is not None and asked.cluster is None and not (with_recipe and asked.levels is None):
        raise UserError(f"--servers: got {_short(asked.servers)}, which needs --cluster NAME to multiply")
    for option, given in (("--memory", asked.memory), ("--latency", asked.latency)):
        if given is not None and asked.levels is None:
            raise UserError(f"{option}: got {_short(given)}, which goes with --levels; a cluster's file says its own")
    if with_recipe and asked.minibatch_size is not None:
        raise UserError(
            f"--minibatch-size: got {_short(asked.minibatch_size)}, which goes with a profile file; "
            "a recipe says train.minibatch_size=N"
        )
    if not with_recipe and asked.profile is None:
        raise UserError(
            "nothing to plan: name a recipe, as in `pipebench plan quickstart`, or a profile file, as in "
            "`pipebench plan --profile vgg16.graph.txt --levels 16@1.25e9`"
        )
    if not with_recipe and asked.cluster is None and asked.levels is None:
        raise UserError("a profile says nothing about links: add --levels 16@1.25e9 or --cluster NAME --servers N")
    for option, given, most in (
        ("--servers", asked.servers, MOST_WORKERS),
        ("--minibatch-size", asked.minibatch_size, 2**31),
    ):
        _whole(option, given, most)
    if asked.levels is not None:
        parse_levels(asked.levels, _quantity("--latency", asked.latency, parse_duration) or 0.0)
        _quantity("--memory", asked.memory, parse_bytes)
    if asked.out is not None and not with_recipe:
        raise UserError(
            f"--out: got {_short(asked.out)}, which goes with a recipe: what a profile file is cut into needn't run"
        )
    if asked.out is not None:
        _refuse_to_overwrite("--out", Path(asked.out), is_our_plan, "a plan's file")
    if asked.picture is not None:
        _refuse_to_overwrite("--picture", Path(asked.picture), is_our_picture, "a picture of a plan")


def with_options(loaded: LoadedRecipe, asked: Asked) -> LoadedRecipe:
    """Return a recipe with what the options say in place of its own."""
    recipe = loaded.recipe
    cluster, engine, parallelism = recipe.cluster, recipe.engine, recipe.parallelism
    if asked.cluster is not None:
        # A relative path on the command line is seen from here, not from the recipe.
        is_file = asked.cluster.endswith((".yaml", ".yml")) and os.path.exists(asked.cluster)
        cluster = replace(cluster, name=os.path.abspath(asked.cluster) if is_file else asked.cluster)
    servers = _whole("--servers", asked.servers, MOST_WORKERS)
    if servers is not None:
        cluster = replace(cluster, servers=servers)
    if asked.profile is not None:
        # With a folder before it no file is taken for one of the words that engine.timing knows.
        engine = replace(engine, timing=asked.profile if os.sep in asked.profile else os.path.join(".", asked.profile))
    if asked.cost_model is not None:
        parallelism = replace(parallelism, cost_model=asked.cost_model)
    return replace(loaded, recipe=replace(recipe, cluster=cluster, engine=engine, parallelism=parallelism))


def plan(loaded: LoadedRecipe | None, asked: Asked) -> None:
    """Plan, print the answer, and draw it if asked to.

    Args:
        loaded: the recipe, as `with_options` returns it; None for a profile file alone.
        asked: the options, checked.

    Raises:
        UserError: the profile or cluster can't be had, or nothing fits in memory.
    """
    began_s = time.perf_counter()
    answer = _of_recipe(loaded, asked) if loaded is not None else _of_file(asked)
    answer = replace(answer, total_s=time.perf_counter() - began_s)
    if asked.as_json:
        standard_output().file.write(plan_json(answer) + "\n")
    else:
        print_plan(answer)
    best = answer.comparison.best
    if asked.out is not None:
        text = form_of(best.plan, answer.layer_names).text()
        _write("--out", asked.out, lambda path: replace_file(Path(path), text.encode()), asked)
    if asked.picture is not None:
        _write("--picture", asked.picture, lambda path: draw_plan(answer, path), asked)


def _write(option: str, path: str, write: Callable[[str], object], asked: Asked) -> None:
    try:
        write(path)
    except OSError as error:
        raise UserError(f"{option}: {path} can't be written: {error.strerror or error}") from error
    print_written(path, _progress(asked))


def parse_levels(text: str, latency_s: float = 0.0) -> tuple[Level, ...]:
    """Return the levels that `4@1e10,4@1.25e9` stands for, innermost first.

    Raises:
        UserError: the text isn't that, or there would be more than MOST_WORKERS workers.
    """
    levels: list[Level] = []
    num_workers = 1
    for index, part in enumerate(text.split(",")):
        count, at, rate = part.partition("@")
        if not at or not re.fullmatch(r"\s*[0-9]{1,9}\s*", count, re.ASCII) or int(count) == 0:
            inside = f" in {_short(text)}" if part != text else ""
            raise UserError(f"--levels: got {_short(part)}{inside}, allowed {_LEVELS_FORM}")
        try:
            bandwidth = parse_bandwidth(rate)
        except UnitError as error:
            raise UserError(f"--levels: level {index + 1}: {error}") from error
        num_workers *= int(count)
        levels.append(Level(str(index + 1), int(count), bandwidth, latency_s))
        if num_workers > MOST_WORKERS or len(levels) > _MOST_LEVELS:
            raise UserError(
                f"--levels: got {_short(text)}, allowed are at most {MOST_WORKERS:,} workers on {_MOST_LEVELS} levels"
            )
    return tuple(levels)


def _of_recipe(loaded: LoadedRecipe, asked: Asked) -> Answer:
    recipe = loaded.recipe
    own = load_cluster(recipe.cluster.name, recipe.cluster.servers, loaded.path.parent)
    with faults_of(loaded), preparing(recipe.name, _progress(asked)) as on_progress:
        made = profiled(recipe, own, on_progress, whole_minibatches=True)
    cluster = own if asked.levels is None else _cluster(asked, own.device)
    parallelism = recipe.parallelism
    request = plan_request(recipe, cluster, made.profile, made.dataset)
    mode = asked.mode or parallelism.mode
    own_mode = None if parallelism.mode == AUTO else parallelism.mode
    row = resolve(parallelism) if own_mode == mode else None
    flushes = own_mode is None or resolve(parallelism).flushes
    request = replace(request, row=row, accumulate=parallelism.accumulate if flushes else None)
    answer = _answer(loaded.recipe.name, request, mode, loaded.source, asked, says_samples=True)
    try:
        return replace(answer, given=_given(parallelism, made.graph, request, mode)) if own_mode == mode else answer
    except PlanError as error:
        raise RecipeError([Fault(loaded.source, "", str(error))]) from error


def _given(parallelism: ParallelismRecipe, graph: LayerGraph, request: Request, mode: str) -> PlanEstimate | None:
    """Return the plan that the recipe names, or None if it names none, or one of another number of workers."""
    planner = Planner(request, mode)
    if is_plan_file(parallelism.plan):
        return planner.judged(plan_of_file(parallelism, request.cluster.num_workers, graph, request.streams))
    if parallelism.plan == AUTO or planner.mode.shape in ("one", "one-stage"):
        return None
    try:
        replicas = parse_plan(parallelism.plan, planner.mode, request.cluster.num_workers)
    except PlanError:  # --cluster and --levels may have changed it
        return None
    starts = None
    if parallelism.cuts is not None:
        starts = starts_of_cuts(graph, parallelism.cuts)
    return planner.given(replicas, starts)


def _progress(asked: Asked) -> Console | None:
    return standard_error() if asked.as_json else None


def _of_file(asked: Asked) -> Answer:
    assert asked.profile is not None
    given = _whole("--minibatch-size", asked.minibatch_size, 2**31)
    profile = profiles.load_profile(asked.profile, given or 1)
    says_samples = given is not None or profile.device != UNKNOWN_DEVICE or {*profile.layers} != {1}
    size = given or max(profile.layers)
    if size not in profile.layers:
        sizes = ", ".join(map(str, sorted(profile.layers)))
        raise UserError(f"--minibatch-size: got {size}, allowed are the sizes in {asked.profile}: {sizes}")
    if not says_samples:
        profile = replace(profile, note=profile.note.replace(" (taken as 1)", ""))
    if asked.levels is not None:
        cluster = _cluster(asked, "device" if profile.device == UNKNOWN_DEVICE else profile.device)
    else:
        assert asked.cluster is not None
        cluster = load_cluster(asked.cluster, _whole("--servers", asked.servers, MOST_WORKERS) or 1)
    model = COST_MODELS[asked.cost_model or DEFAULT]
    request = Request(profile, cluster, model, size, runnable=False)
    name = plain_name(Path(asked.profile))
    return _answer(name, request, asked.mode or "pipedream", "", asked, says_samples=says_samples)


def _answer(name: str, request: Request, mode: str, source: str, asked: Asked, *, says_samples: bool) -> Answer:
    try:
        with searching(name, _progress(asked)) as tell:
            comparison = compare(request, None if mode == AUTO else mode, shapes=asked.shapes, tell=tell)
        best = comparison.best
        spare_s = None
        row = request.row or MODES[best.plan.mode]
        waits = best.is_simulated and best.minibatch_s > _DIFFERS * best.bottleneck_s
        if waits and not row.flushes and len(best.stages) > 1:
            planner = Planner(request if best.plan.mode == mode else replace(request, row=None), best.plan.mode)
            spare_s = planner.predicted(
                replace(best, plan=replace(best.plan, depth=best.plan.depth + 1), is_simulated=False)
            ).minibatch_s
    except (GraphError, PlanError, ProfileError) as error:
        if source:
            raise RecipeError([Fault(source, "", str(error))]) from error
        raise
    return Answer(name, request, row, comparison, says_samples, spare_s)


def _cluster(asked: Asked, device: str) -> Cluster:
    assert asked.levels is not None
    levels = parse_levels(asked.levels, _quantity("--latency", asked.latency, parse_duration) or 0.0)
    return Cluster(asked.levels, device, _quantity("--memory", asked.memory, parse_bytes), levels)


def _quantity(option: str, given: str | None, parse: Callable[[object], _T]) -> _T | None:
    try:
        return None if given is None else parse(given)
    except UnitError as error:
        raise UserError(f"{option}: {error}") from error


def _whole(option: str, given: str | None, most: int) -> int | None:
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", given, re.ASCII) or not 1 <= int(given) <= most:
        raise UserError(f"{option}: got {_short(given)}, allowed is a whole number from 1 to {most}")
    return int(given)


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 2]}..")


def _refuse_to_overwrite(option: str, path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    if not path.parent.is_dir():
        raise UserError(f"{option}: got {path}, but there is no folder {path.parent}")
    if path.exists() and not (path.is_file() and is_ours(path)):
        raise UserError(f"{option}: {path} is there and isn't {what}, so it is left alone; name another")
