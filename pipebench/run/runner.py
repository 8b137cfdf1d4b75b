"""Prepare recipes, train or simulate, record and print.

Experiment = suite, parent run = comparison (or the seeds of one recipe), child = one run of one recipe.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

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
# A run's id in MLflow or, if it has none, its record's folder, by name and seed (None for a group of seeds)
_Ids = dict[tuple[str, int | None], str | Path | None]


def run_recipes(loaded: Sequence[LoadedRecipe], suite: Suite, *, seeds: Sequence[int] | None) -> int:
    """Run every recipe as `run_all` does; print results side by side; return the worst exit code."""
    made = run_all(loaded, suite, seeds=seeds)
    if len(loaded) > 1 or len(made.runs) > 1:
        made.print_to(standard_output())
    return made.exit_code


def run_all(loaded: Sequence[LoadedRecipe], suite: Suite, *, seeds: Sequence[int] | None) -> RunComparison:
    """Run every recipe once per seed (None for the recipe's own), print and record each result; return them all.

    Raises:
        UserError: the results can't be recorded anywhere.
        WorkersFailedError: processes ended without a result.
    """
    require_writable()
    several = len(loaded) > 1
    # Faults visible only in the traced model must be raised before the first recipe runs.
    decisions = [decide(each, suite, alone=not several) for each in loaded]
    tracking = Tracking(suite.name)
    tracking.close_orphaned(records(besides=suite.resumed))
    total, numbers = len(loaded) * len(seeds or [0]), itertools.count(1)
    suite = _drawing_few(suite, len(seeds or [0]) * sum(not engine_kind(each.recipe).trains for each in loaded))

    def begin(name: str) -> None:
        if total > 1 and suite.prints:
            console.print_position(next(numbers), total, name, standard_output())

    title = comparison_title([each.run_name for each in loaded], datetime.now())
    parent = start_parent(tracking, title, "comparison", loaded) if several else None
    runs, ids = list[Run](), _Ids()
    try:
        with printing_what_is_left(loaded, suite, seeds, ids):
            for each, decision in zip(loaded, decisions, strict=True):
                request = RunRequest(each, each.run_name, suite, parent, decision)
                _run_with_seeds(request, seeds, tracking, begin, (runs, ids))
                if runs[-1].result.outcome == INTERRUPTED:
                    break
    except KeyboardInterrupt:  # between two runs, or while pictures of one were drawn
        if suite.prints and runs and total > 1:
            RunComparison(tuple(runs), parent.where() if parent else "").print_to(standard_output())
        raise
    finally:
        if parent is not None:
            _record_speed_ups(parent, [run.result for run in runs], ids)
            finish_parent(parent, runs, complete=len(runs) == total)
        tracking.close()
    return RunComparison(tuple(runs), parent.where() if parent else "")


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
        if len(drawn) <= _MOST_BLOCKS or max(*units[0], *units[1]) <= 2:
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
    begin: Callable[[str], None],
    made: tuple[list[Run], _Ids],
) -> None:
    """Run a recipe once per seed, as a group if there are several.

    Args:
        given: the run, without a seed.
        seeds: None for the recipe's own.
        tracking: where runs are recorded.
        begin: called with every run's name before it starts.
        made: gets every run and its id as it ends, so that a later failure doesn't lose them.
    """
    loaded, name, (runs, ids) = given.loaded, given.name, made
    if seeds is None or len(seeds) == 1:
        begin(name)
        seed = loaded.recipe.train.seed if seeds is None else seeds[0]
        _run_one(replace(given, loaded=with_seed(loaded, seed)), tracking, made)
        return
    title = f"{name}, seeds {', '.join(map(str, seeds))}"
    group, first = start_parent(tracking, title, "seeds", [loaded], given.parent), len(runs)
    try:
        for seed in seeds:
            begin(f"{name}-seed{seed}")
            request = replace(given, loaded=with_seed(loaded, seed), name=f"{name}-seed{seed}", parent=group)
            _run_one(request, tracking, made)
            if runs[-1].result.outcome == INTERRUPTED:
                break
    finally:
        results = [run.result for run in runs[first:]]
        if results:
            group.metrics(ranked(summarise_seeds(results) | seed_medians(results), results[0].clock))
        finish_parent(group, runs[first:], complete=len(results) == len(seeds))
        ids[name, None] = group.run_id or group.folder


def _run_one(request: RunRequest, tracking: Tracking, made: tuple[list[Run], _Ids]) -> None:
    """Run a recipe with its seed and add the run to `made`, also if it was interrupted once it had its result."""
    runs, ids = made
    recipe = request.loaded.recipe
    interrupt: EndedRunInterrupt | None = None
    try:
        run = RUNS[recipe.engine.kind](request, tracking)
    except EndedRunInterrupt as error:
        run, interrupt = error.run, error
    runs.append(run)
    ids[request.loaded.run_name, recipe.train.seed] = run.mlflow_run_id or run.record
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
