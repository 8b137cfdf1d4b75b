"""Prepare recipes, train or simulate, record and print.

Experiment = suite, parent run = comparison (or the seeds of one recipe), child = one run of one recipe.
"""

import itertools
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from pipebench.distributed import launch
from pipebench.errors import UserError, WorkersFailedError, is_out_of_memory, print_notice, printable_lines
from pipebench.formats import seconds
from pipebench.metrics import ranked
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.deciding import decision_of, prepare_job, stored_decision
from pipebench.run.folder import records
from pipebench.run.one_process import run_simulated, run_virtual
from pipebench.run.processes import run_distributed
from pipebench.run.recorder import EndedRunInterrupt
from pipebench.run.request import RunRequest, with_seed
from pipebench.run.suite import Suite, printing_what_is_left
from pipebench.schedule.orders import as_csv
from pipebench.schedule.pipeline import SPLIT
from pipebench.show import console
from pipebench.show.answers import Run, RunComparison
from pipebench.show.comparison import groups, headings, rows, short_names, speed_ups
from pipebench.show.terminal import is_terminal, standard_output
from pipebench.show.verdict import comparison_markdown
from pipebench.simulate.drawing import blocks, draw_cells
from pipebench.tracking.entries import logged_params
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.tracking.store import require_writable
from pipebench.tracking.summary import count_reached, seed_medians, summarise_seeds
from pipebench.train.job import Decision
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.result import INTERRUPTED, RunResult

# Functions that run a recipe, and record and print the result, by kind of engine.
RUNS: dict[str, Callable[[RunRequest, Tracking], Run]] = {
    "virtual": run_virtual,
    "simulated": run_simulated,
    "distributed": run_distributed,
}
_MOST_NAMED = 6  # runs in a comparison's name
_MOST_DRAWN = 16  # simulated runs with pictures, which take one second of a run; the rest of it takes half a second
_MOST_BLOCKS = 2  # of a picture too wide for a terminal; if it has more, columns stand for longer times
_MOST_COLUMNS = 500  # of a drawing that isn't cut to a terminal's width
# A run's id in MLflow or, if it has none, its record's folder, by name and seed (None for a group of seeds)
_Ids = dict[tuple[str, int | None], str | Path | None]


@dataclass(frozen=True)
class _Made:
    """What the runs of a command have led to so far."""

    runs: list[Run] = field(default_factory=list)  # those with a result
    ids: _Ids = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)  # of other runs

    @property
    def interrupted(self) -> bool:
        """Whether the user has interrupted a run, and so all that would follow."""
        return bool(self.runs) and self.runs[-1].result.outcome == INTERRUPTED


def run_recipes(loaded: Sequence[LoadedRecipe], suite: Suite, *, seeds: Sequence[int] | None) -> int:
    """Run every recipe as `run_all` does; print results side by side; return the worst exit code."""
    several = num_runs(loaded, seeds) > 1
    made = run_all(loaded, suite, seeds=seeds, show=lambda made: made.print_to(standard_output()) if several else None)
    return made.exit_code


def num_runs(loaded: Sequence[LoadedRecipe], seeds: Sequence[int] | None) -> int:
    """Return how many runs a command makes."""
    return len(loaded) * len(seeds or [0])


def run_all(
    loaded: Sequence[LoadedRecipe],
    suite: Suite,
    *,
    seeds: Sequence[int] | None,
    show: Callable[[RunComparison], None] = lambda made: None,
) -> RunComparison:
    """Run every recipe once per seed (None for the recipe's own), print and record each result; return them all.

    If a run of several fails, the others go on, and its error is raised at the end. Before that, `show` gets the runs
    that have a result, if any.

    Raises:
        UserError: the results can't be recorded anywhere, or a run failed by the user's mistake.
        WorkersFailedError: processes ended without a result.
    """
    require_writable()
    # Faults visible only in the traced model must be raised before the first recipe runs.
    decisions = [decide(each, suite, alone=len(loaded) == 1) for each in loaded]
    tracking = Tracking(suite.name)
    tracking.close_orphaned(records(besides=suite.resumed))
    suite = _drawing_few(suite, len(seeds or [0]) * sum(not engine_kind(each.recipe).trains for each in loaded))
    title = comparison_title([each.run_name for each in loaded], datetime.now())
    parent = start_parent(tracking, title, "comparison", loaded) if len(loaded) > 1 else None
    pairs = zip(loaded, decisions, strict=True)
    requests = [RunRequest(each, each.run_name, suite, parent, decision) for each, decision in pairs]
    return _run_together(requests, seeds, tracking, parent, show)


def _run_together(
    requests: Sequence[RunRequest],
    seeds: Sequence[int] | None,
    tracking: Tracking,
    parent: RunLog | None,
    show: Callable[[RunComparison], None],
) -> RunComparison:
    """Make the runs of `run_all`, and record them in their parent, if there is one."""
    made, loaded = _Made(), [each.loaded for each in requests]
    try:
        with printing_what_is_left(loaded, requests[0].suite, seeds, made.ids):
            _run_each(requests, seeds, tracking, made)
    except BaseException:  # such as Ctrl-C between two runs, or while pictures of one were drawn
        _show(made, parent, show)
        raise
    finally:
        if parent is not None:
            _record_speed_ups(parent, [run.result for run in made.runs], made.ids)
            finish_parent(parent, made.runs, complete=len(made.runs) == num_runs(loaded, seeds))
        tracking.close()
    answer = _show(made, parent, show)
    if made.failures:
        raise made.failures[0]
    return answer


def _show(made: _Made, parent: RunLog | None, show: Callable[[RunComparison], None]) -> RunComparison:
    """Return the runs that have a result, after they were shown, if there are any."""
    answer = RunComparison(tuple(made.runs), parent.where() if parent else "")
    if made.runs:
        show(answer)
    return answer


def _run_each(requests: Sequence[RunRequest], seeds: Sequence[int] | None, tracking: Tracking, made: _Made) -> None:
    """Run recipes one after another, each with all seeds; see `_run_with_seeds`."""
    total, numbers = len(requests) * len(seeds or [0]), itertools.count(1)

    def run_one(request: RunRequest) -> None:
        if total > 1 and request.suite.prints:
            console.print_position(next(numbers), total, request.name, standard_output())
        try:
            _run_one(request, tracking, made)
        except Exception as error:
            if total == 1 or not _concerns_one_run(error):
                raise
            why = "; ".join(printable_lines(str(error).removeprefix(f"{request.name}: ")))
            print_notice(f"{request.name} has failed: {why}")
            made.failures.append(error)
            _free_variables(error)

    for request in requests:
        _run_with_seeds(request, seeds, tracking, run_one, made)
        if made.interrupted:
            break


def _free_variables(error: BaseException | None) -> None:
    """Free what the functions had in which an error was raised, such as a model, for the runs that follow."""
    freed = list[BaseException]()
    while error is not None and error not in freed:  # an error may be its own cause
        traceback.clear_frames(error.__traceback__)
        freed.append(error)
        error = error.__cause__ or error.__context__


def _concerns_one_run(error: Exception) -> bool:
    """Return whether a run's failure says nothing of other runs: by the user's code, memory, or its processes.

    A full disk or a fault of pipebench's would end them, too.
    """
    if isinstance(error, WorkersFailedError):
        return error.exit_code != launch.INTERRUPTED
    return isinstance(error, UserError) or is_out_of_memory(error)


def _drawing_few(suite: Suite, num_simulated: int) -> Suite:
    """Return a suite without pictures of simulated runs if these are too many, and print that."""
    if num_simulated <= _MOST_DRAWN:
        return suite
    if suite.prints:
        console.print_undrawn(num_simulated, standard_output())
    return replace(suite, draws=False)


def decide(loaded: LoadedRecipe, suite: Suite, *, alone: bool) -> Decision | None:
    """Decide plan and profile of a run for all its processes and seeds; None if one process runs it.

    It also refuses faults that are visible only in the traced model, before any recipe runs. If the recipe is `alone`,
    this is skipped, as nothing is lost by finding them later.
    """
    if engine_kind(loaded.recipe).in_processes:
        stored = stored_decision(suite.resumed, suite.overrides)
        return stored or decision_of(prepare_job(loaded, trains=False, apart=True))
    if not alone:
        prepare_job(loaded, trains=False)
    return None


def draw(loaded: LoadedRecipe, *, versions: bool = False, cut: bool = True) -> str:
    """Return the start of a recipe's pipeline as text, in units of a fast stage's forward time.

    Transfers take no time.

    Args:
        loaded: the recipe.
        versions: whether to show the weight version of every forward and backward.
        cut: whether lines are limited to the terminal's width.
    """
    job = prepare_job(loaded, trains=False)
    setup = job.setup
    travels = setup.costs.most_samples
    forward = [stage.forward_s[travels] for stage in setup.costs.stages]
    backward = [stage.backward_s[travels] for stage in setup.costs.stages]
    weight = [stage.weight_s[travels] for stage in setup.costs.stages]
    pipeline = setup.pipeline
    if pipeline.backward == SPLIT:
        backward = [whole - part for whole, part in zip(backward, weight, strict=True)]
    unit_s = min(value for value in (*forward, *backward) if value > 0)
    # Two flushes; without flushes the fill time again in steady state, and a few updates.
    count = 2 * pipeline.period if pipeline.flushes else max(3 * pipeline.period, 2 * pipeline.block * pipeline.depth)
    width = standard_output().width if cut and is_terminal() else None
    for longer in (1, 2, 4, 8, 16, 32, 64):
        units = [[max(1, round(value / unit_s / longer)) for value in row] for row in (forward, backward, weight)]
        if pipeline.backward == SPLIT:
            units[1] = [sum(parts) for parts in zip(*units[1:], strict=True)]
        cells = draw_cells(pipeline, count, *units[:2], weight=units[2], versions=versions)
        drawn = blocks(pipeline, cells, width)
        is_small = len(drawn) <= _MOST_BLOCKS and (width is not None or len(cells[0]) <= _MOST_COLUMNS)
        if is_small or max(*units[0], *units[1]) <= 2:
            break
    column = f"one column = {seconds(longer * unit_s)}{', or a shorter pass' if longer > 1 else ''}"
    below = "; lines go on below" if len(drawn) > 1 else ""
    title = f"{loaded.recipe.parallelism.mode}, plan {setup.plan}, {column}, transfers take no time{below}"
    return "\n".join([title, "\n\n".join(drawn)])


def forecast(loaded: LoadedRecipe) -> MemoryForecast:
    """Return a recipe's simulated memory and occupancy over time."""
    return MemoryForecast(prepare_job(loaded, trains=False))


def schedule_csv(loaded: LoadedRecipe) -> str:
    """Return one update's passes of a recipe in torch's CSV form; raises a UserError if that can't express them."""
    return as_csv(prepare_job(loaded, trains=False).setup.pipeline)


def _run_with_seeds(
    given: RunRequest,
    seeds: Sequence[int] | None,
    tracking: Tracking,
    run_one: Callable[[RunRequest], None],
    made: _Made,
) -> None:
    """Run a recipe once per seed, as a group if there are several.

    Args:
        given: the run, without a seed.
        seeds: None for the recipe's own.
        tracking: where runs are recorded.
        run_one: makes the run of a seed.
        made: gets every run and its id as it ends, so that a later failure doesn't lose them.
    """
    loaded, name = given.loaded, given.name
    if seeds is None or len(seeds) == 1:
        seed = loaded.recipe.train.seed if seeds is None else seeds[0]
        run_one(replace(given, loaded=with_seed(loaded, seed)))
        return
    title = f"{name}, seeds {', '.join(map(str, seeds))}"
    group, first = start_parent(tracking, title, "seeds", [loaded], given.parent), len(made.runs)
    try:
        for seed in seeds:
            run_one(replace(given, loaded=with_seed(loaded, seed), name=f"{name}-seed{seed}", parent=group))
            if made.interrupted:
                break
    finally:
        runs = made.runs[first:]
        results = [run.result for run in runs]
        if results:
            group.metrics(ranked(summarise_seeds(results) | seed_medians(results), results[0].clock))
        finish_parent(group, runs, complete=len(results) == len(seeds))
        made.ids[name, None] = group.run_id or group.folder


def _run_one(request: RunRequest, tracking: Tracking, made: _Made) -> None:
    """Run a recipe with its seed and add the run to `made`, also if it was interrupted once it had its result."""
    recipe = request.loaded.recipe
    interrupt: EndedRunInterrupt | None = None
    try:
        run = RUNS[recipe.engine.kind](request, tracking)
    except EndedRunInterrupt as error:
        run, interrupt = error.run, error
    made.runs.append(run)
    made.ids[request.loaded.run_name, recipe.train.seed] = run.mlflow_run_id or run.record
    if interrupt is not None:
        raise interrupt


def comparison_title(names: Sequence[str], begun: datetime) -> str:
    """Return a comparison's name in MLflow: what is compared and its start.

    >>> comparison_title(["quickstart-dp", "quickstart-gpipe"], datetime(2026, 1, 31, 9, 5))
    'dp, gpipe, 2026-01-31 09:05'
    """
    short = [*short_names(names).values()]
    more = [f"{len(short) - _MOST_NAMED} more"] if len(short) > _MOST_NAMED else []
    return ", ".join([*short[:_MOST_NAMED], *more, f"{begun:%Y-%m-%d %H:%M}"])


def _record_speed_ups(parent: RunLog, results: Sequence[RunResult], ids: _Ids) -> None:
    """Record in every run of a comparison its speed-up over data parallelism."""
    for key, values in speed_ups(results).items():
        about = ids.get(key)
        if about is not None and values:
            parent.metrics(values, about=about)


_TABLE = "comparison.json"
# Artifacts that MLflow shows as tables, as its own `log_table` writes them.
_TABLES_TAG = "mlflow.loggedArtifacts"


def start_parent(
    tracking: Tracking, title: str, kind: str, loaded: Sequence[LoadedRecipe], parent: RunLog | str | None = None
) -> RunLog:
    """Begin the record of several runs: params are the keys that all recipes share, tags list modes and engines."""
    shared = {
        key: value for key, value in loaded[0].flat.items() if all(each.flat.get(key) == value for each in loaded)
    }
    kinds = [engine_kind(each.recipe) for each in loaded]
    tags = {
        "kind": kind,
        "mode": _listed(each.recipe.parallelism.mode for each in loaded),
        "engine": _listed(each.name for each in kinds),
        "clock": _listed(each.clock for each in kinds),
    }
    return tracking.start(title, params=logged_params(shared), tags=tags, parent=parent, virtual=False)


def finish_parent(parent: RunLog, runs: Sequence[Run], *, complete: bool) -> None:
    """Record table, curves, summary and page of runs, and close the record."""
    results = [run.result for run in runs]
    if results:
        tags = {
            "mode": _listed(each.mode for each in results),
            "plan": _listed(each.plan for each in results),
            "outcome": _outcomes(results),
            _TABLES_TAG: json.dumps([{"path": _TABLE, "type": "table"}]),
        }
        for name, value in tags.items():
            parent.tag(name, value)
        if len({result.name for result in results}) > 1:
            parent.metrics(count_reached(results))
        markdown = comparison_markdown(results)
        parent.text("comparison.md", markdown)
        parent.text(_TABLE, _table_json(results))
        from pipebench.run.drawings import record_comparison  # late: imports matplotlib

        parent.describe(markdown, record_comparison(parent, runs))
    parent.finish(None, status="FINISHED" if complete else "KILLED")


def _table_json(results: Sequence[RunResult]) -> str:
    """Return a comparison's table in the form that MLflow shows; groups that can't be compared have a first column."""
    found = groups(results)
    titled = len(found) > 1
    lines = [[*([group.title] if titled else []), *row] for group in found for row in rows(results, group)]
    return json.dumps({"columns": [*(["group"] if titled else []), *headings(results)], "data": lines})


def _listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _outcomes(results: Sequence[RunResult]) -> str:
    """Count outcomes as text: `3 reached, 1 missed`."""
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
