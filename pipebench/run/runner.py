"""Prepare recipes, train or simulate, record and print.

Experiment = suite, parent run = comparison (or the seeds of one recipe), child = one run of one recipe.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.deciding import prepare_job
from pipebench.run.left import telling_what_is_left
from pipebench.run.one_process import EngineRuns, SimulatedRuns, VirtualRuns
from pipebench.run.processes import DistributedRuns
from pipebench.run.request import RunRequest, with_seed
from pipebench.run.suite import Suite
from pipebench.schedule.as_csv import as_csv
from pipebench.schedule.pipeline import SPLIT
from pipebench.show import console
from pipebench.show.comparison import short_names, speed_ups
from pipebench.show.terminal import is_terminal, standard_output
from pipebench.show.verdict import comparison_markdown
from pipebench.simulate.drawing import draw as draw_schedule
from pipebench.tracking import RunLog, Tracking, logged_params, require_writable, seed_medians, summarise_seeds
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, RunResult

_LOG = logging.getLogger("pipebench.run")
RUNS: Mapping[str, EngineRuns] = {
    "virtual": VirtualRuns(),
    "simulated": SimulatedRuns(),
    "distributed": DistributedRuns(),
}  # by kind of engine
_MOST_NAMED = 6  # runs in a comparison's name
_Ids = dict[tuple[str, int | None], str | None]
_WORST_FIRST = (INTERRUPTED, DIVERGED, MISSED, COMPLETED, REACHED)


def run_recipes(loaded: Sequence[LoadedRecipe], suite: Suite, *, seeds: Sequence[int] | None) -> int:
    """Run every recipe once per seed (None for the recipe's own); print and record results; return the worst exit code.

    Raises:
        UserError: the results can't be recorded anywhere.
        WorkersFailedError: processes ended without a result.
    """
    require_writable()
    several = len(loaded) > 1
    # Faults visible only in the traced model must be raised before the first recipe runs.
    decisions = [RUNS[each.recipe.engine.kind].decide(each, suite, alone=not several) for each in loaded]
    tracking = None if _is_recorded_elsewhere(loaded, seeds) else Tracking(suite.name)
    total, numbers = len(loaded) * len(seeds or [0]), itertools.count(1)

    def begin(name: str) -> None:
        if total > 1:
            console.print_position(next(numbers), total, name)

    parent = _begun_comparison(loaded, tracking) if several and tracking else None
    results: list[RunResult] = []
    ids: _Ids = {}  # MLflow's, by name and seed (None for a group of seeds)
    stopped: KeyboardInterrupt | None = None
    try:
        with telling_what_is_left(loaded, suite, seeds, ids):
            for each, decision in zip(loaded, decisions, strict=True):
                request = RunRequest(each, each.run_name, suite, parent, decision)
                results += _run_with_seeds(request, seeds, tracking, begin, ids)
                if results[-1].outcome == INTERRUPTED:
                    break
    except KeyboardInterrupt as error:  # between two runs
        stopped = error
    finally:
        if parent is not None:
            _tell_speed_ups(parent, results, ids)
            _finish_comparison(parent, results, complete=len(results) == total)
    _print_together(results, parent, several=several)
    if stopped is not None:
        raise stopped
    return min(results, key=lambda result: _WORST_FIRST.index(result.outcome)).exit_code


def _is_recorded_elsewhere(loaded: Sequence[LoadedRecipe], seeds: Sequence[int] | None) -> bool:
    """Return whether a run's processes record everything, so that this one needs no MLflow."""
    processes_only = all(engine_kind(each.recipe).in_processes for each in loaded)
    return processes_only and len(loaded) * len(seeds or [0]) == 1


def _begun_comparison(loaded: Sequence[LoadedRecipe], tracking: Tracking) -> RunLog:
    title = comparison_title([each.run_name for each in loaded], datetime.now())
    return tracking.start(title, params={}, tags={"kind": "comparison"}, virtual=False)


def _print_together(results: Sequence[RunResult], parent: RunLog | None, *, several: bool) -> None:
    """Print the table of a comparison of several recipes, or of the seeds of one."""
    if several and results:
        console.print_comparison(results, parent.where() if parent else "")
    elif len(results) > 1:
        console.print_seeds(results[0].name, results, summarise_seeds(results))


def draw(loaded: LoadedRecipe, *, versions: bool = False, cut: bool = True) -> str:
    """Return the start of a recipe's pipeline as text, in units of a fast stage's forward time, with free links.

    `versions` adds the weight version of every forward and backward; `cut` limits lines to the terminal's width.
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
    cells = [[max(1, round(value / unit_s)) for value in row] for row in (forward, backward, weight)]
    if pipeline.backward == SPLIT:
        cells[1] = [sum(parts) for parts in zip(*cells[1:], strict=True)]
    # Two flushes; without flushes the fill time again in steady state, and a few updates.
    count = 2 * pipeline.period if pipeline.flushes else max(3 * pipeline.period, 2 * pipeline.block * pipeline.depth)
    title = f"{loaded.recipe.parallelism.mode}, plan {setup.plan}, one column = {unit_s:.3g} s, links free"
    width = standard_output().width if cut and is_terminal() else None
    return f"{title}\n{draw_schedule(pipeline, count, *cells[:2], weight=cells[2], width=width, versions=versions)}"


def watch(loaded: LoadedRecipe) -> MemoryForecast:
    """Return a recipe's simulated memory and occupancy over time."""
    return MemoryForecast.over(prepare_job(loaded, trains=False))


def schedule_csv(loaded: LoadedRecipe) -> str:
    """Return one update's passes of a recipe in torch's CSV form; raises a UserError if that can't express them."""
    return as_csv(prepare_job(loaded, trains=False).setup.pipeline)


def _run_with_seeds(
    given: RunRequest, seeds: Sequence[int] | None, tracking: Tracking | None, begin: Callable[[str], None], ids: _Ids
) -> list[RunResult]:
    """Run a recipe once per seed, grouped if several; record MLflow's ids in `ids`."""
    loaded, name = given.loaded, given.name
    run = RUNS[loaded.recipe.engine.kind].run
    if seeds is None or len(seeds) == 1:
        begin(name)
        seed = loaded.recipe.train.seed if seeds is None else seeds[0]
        result, ids[name, seed] = run(replace(given, loaded=with_seed(loaded, seed)), tracking)
        return [result]
    assert tracking is not None
    group = tracking.start(
        f"{name}, seeds {', '.join(map(str, seeds))}",
        params=logged_params(loaded.flat),
        tags={"kind": "seeds"},
        parent=given.parent,
        virtual=False,
    )
    results: list[RunResult] = []
    try:
        for seed in seeds:
            begin(f"{name}-seed{seed}")
            request = replace(given, loaded=with_seed(loaded, seed), name=f"{name}-seed{seed}", parent=group)
            result, ids[name, seed] = run(request, tracking)
            results.append(result)
            if results[-1].outcome == INTERRUPTED:
                break
    finally:
        if results:
            group.tag("mode", results[0].mode)
            group.tag("plan", results[0].plan)
            group.metrics(summarise_seeds(results) | seed_medians(results))
        ids[name, None] = group.run_id
        _finish_comparison(group, results, complete=len(results) == len(seeds))
    return results


def _finish_comparison(parent: RunLog, results: Sequence[RunResult], *, complete: bool) -> None:
    """Record table and curves of a comparison or group of seeds, and close its record."""
    if results:
        parent.tag("outcome", _outcomes(results))
        markdown = comparison_markdown(results)
        parent.text("comparison.md", markdown)
        from pipebench.run.drawings import record_curves  # late: imports matplotlib

        parent.describe(markdown, record_curves(parent, results))
    parent.finish(None, status="FINISHED" if complete else "KILLED")


def comparison_title(names: Sequence[str], begun: datetime) -> str:
    """Return a comparison's name in MLflow: what is compared and its start.

    >>> comparison_title(["quickstart-dp", "quickstart-gpipe"], datetime(2026, 1, 31, 9, 5))
    'dp, gpipe, 2026-01-31 09:05'
    """
    short = [*short_names(names).values()]
    more = [f"{len(short) - _MOST_NAMED} more"] if len(short) > _MOST_NAMED else []
    return ", ".join([*short[:_MOST_NAMED], *more, f"{begun:%Y-%m-%d %H:%M}"])


def _tell_speed_ups(parent: RunLog, results: Sequence[RunResult], ids: _Ids) -> None:
    """Record in every run of a comparison its speed-up over data parallelism."""
    for key, values in speed_ups(results).items():
        run_id = ids.get(key)
        if run_id is not None and values:
            parent.metrics(values, about=run_id)


def _outcomes(results: Sequence[RunResult]) -> str:
    """Count outcomes as text: `3 reached, 1 missed`."""
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
