"""Runs recipes: prepares each, trains or simulates it, records it, and prints the answer.

Experiment = suite, parent run = comparison (or the seeds of one recipe), child = one run of one recipe.
"""

import contextlib
import io
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipebench import console, pictures, run_folder
from pipebench.device import environment, torch_settings
from pipebench.errors import Fault, GraphError, PlanError, ProfileError, RecipeError, UserError, printable
from pipebench.prediction import compare, prediction_markdown
from pipebench.prepare import DISTRIBUTED, SIMULATED, Prepared, prepare
from pipebench.process_run import Asked, kept_decision, run_in_processes
from pipebench.progress import Silent
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.schema import Recipe
from pipebench.recording import collected_log, recipe_yaml, record_inputs, record_timeline, run_tags
from pipebench.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult
from pipebench.run_folder import RunFolder
from pipebench.schedule.drawing import draw as draw_schedule
from pipebench.simulated import predicted_metrics, simulate_epoch
from pipebench.steady import simulate_segment
from pipebench.suite import Suite
from pipebench.timeline import Timeline
from pipebench.tracking import RunLog, Tracking, summarise_seeds
from pipebench.training import Keeping, Progress, on_virtual_clock, segment_length, train_to_target

_LOG = logging.getLogger("pipebench.run")
_READABLE_S = 60.0  # shorter virtual runs are stretched in MLflow's timestamps, which are whole milliseconds
_PICTURE_WIDTH = 100
_WORST_FIRST = (INTERRUPTED, DIVERGED, MISSED, COMPLETED, REACHED)


def run_recipes(loaded: Sequence[LoadedRecipe], suite: Suite, *, seeds: Sequence[int] | None) -> int:
    """Run every recipe, once per seed; print and record the answers.

    Args:
        loaded: validated recipes.
        suite: how.
        seeds: seeds to run each with; None for the recipe's own.

    Returns:
        The worst exit code of the runs.

    Raises:
        WorkersFailedError: processes ended without a result.
    """
    if len(loaded) > 1:  # what only the traced model shows to be wrong must come out before the first recipe runs
        for each in loaded:
            prepared_recipe(each, each.recipe, trains=False)
    several = len(loaded) > 1
    processes_only = all(each.recipe.engine.kind == DISTRIBUTED for each in loaded)
    # Where all there is to record is recorded by the processes, this one has no use for MLflow.
    tracking = None if processes_only and not several and len(seeds or [0]) == 1 else Tracking(suite.name)
    comparison = {"kind": "comparison"}
    parent = tracking.start(suite.name, params={}, tags=comparison, virtual=False) if several and tracking else None
    results: list[RunResult] = []
    try:
        for each in loaded:
            results += _run_with_seeds(each, seeds, suite, tracking, parent)
            if results[-1].outcome == INTERRUPTED:
                break
    finally:
        if parent is not None:
            _finish_comparison(parent, results, complete=len(results) >= len(loaded))
    if several:
        console.print_comparison(results, parent.where() if parent else "")
    worst = min(results, key=lambda result: _WORST_FIRST.index(result.outcome))
    return worst.exit_code


def draw(loaded: LoadedRecipe) -> str:
    """Return the start of a recipe's pipeline as text, in units of a fast stage's forward time, links free."""
    prepared = prepared_recipe(loaded, loaded.recipe, trains=False)
    setup = prepared.setup
    travels = max(setup.costs.stages[0].forward_s)
    forward = [stage.forward_s[travels] for stage in setup.costs.stages]
    backward = [stage.backward_s[travels] for stage in setup.costs.stages]
    unit_s = min(value for value in (*forward, *backward) if value > 0)
    cells = [[max(1, round(value / unit_s)) for value in row] for row in (forward, backward)]
    rounds = max(setup.pipeline.round_size(0), setup.pipeline.block * max(setup.pipeline.warmups) * 2)
    title = f"{loaded.recipe.parallelism.mode}, plan {setup.plan}, one column = {unit_s:.3g} s, links free"
    return f"{title}\n{draw_schedule(setup.pipeline, rounds, cells[0], cells[1])}"


def _run_with_seeds(
    loaded: LoadedRecipe, seeds: Sequence[int] | None, suite: Suite, tracking: Tracking | None, parent: RunLog | None
) -> list[RunResult]:
    name = loaded.recipe.name
    if seeds is None or len(seeds) == 1:
        seed = loaded.recipe.train.seed if seeds is None else seeds[0]
        return [_run_one(loaded, seed, name, suite, tracking, parent)]
    assert tracking is not None
    group = tracking.start(name, params=loaded.flat, tags={"kind": "seeds"}, parent=parent, virtual=False)
    results: list[RunResult] = []
    try:
        for seed in seeds:
            results.append(_run_one(loaded, seed, f"{name}-seed{seed}", suite, tracking, group))
            if results[-1].outcome == INTERRUPTED:
                break
    finally:
        spread = summarise_seeds(results) if results else {}
        group.metrics(spread)
        group.finish(None, status="FINISHED" if len(results) == len(seeds) else "KILLED")
    console.print_seeds(name, results, spread)
    return results


def _run_one(
    loaded: LoadedRecipe, seed: int, name: str, suite: Suite, tracking: Tracking | None, parent: RunLog | None
) -> RunResult:
    recipe = with_seed(loaded.recipe, seed)
    kind = recipe.engine.kind
    if kind == DISTRIBUTED:
        decided = kept_decision(suite.resumed, suite.overrides)
        with torch_settings(recipe.engine):
            prepared = prepared_recipe(loaded, recipe, trains=False, decided=decided)
        reference = str(suite.resumed.recipe_path if suite.resumed else loaded.path)
        asked = Asked((reference, *suite.overrides), suite.name, suite.verbose, suite.resumed)
        if suite.resumed is not None:
            asked = replace(asked, words=suite.overrides)
        parent_id = parent.wait_for_id() if parent is not None else None
        return run_in_processes(loaded, prepared, name, asked, parent_id)
    assert tracking is not None
    with collected_log(suite.verbose) as log_text, torch_settings(recipe.engine):
        prepared = prepared_recipe(loaded, recipe)
        keeping, folder = _keeping(loaded, prepared, name, suite)

        def train(progress: Progress, on_point: Callable[[Point], None]) -> tuple[RunResult, Timeline]:
            if kind == SIMULATED:
                return simulate_epoch(prepared)
            return train_to_target(prepared, on_virtual_clock(prepared), progress, on_point, keeping)

        if folder is None:
            return recorded_run(loaded, prepared, name, tracking, parent, log_text, train)
        return recorded_run(
            loaded, prepared, name, tracking, parent, log_text, train,
            mlflow_run_id=folder.read().mlflow_run_id, on_run_id=folder.keep_mlflow_run_id,
        )  # fmt: skip


def recorded_run(
    loaded: LoadedRecipe,
    prepared: Prepared,
    name: str,
    tracking: Tracking,
    parent: RunLog | str | None,
    log_text: io.StringIO,
    train: Callable[[Progress, Callable[[Point], None]], tuple[RunResult, Timeline]],
    *,
    mlflow_run_id: str | None = None,
    on_run_id: Callable[[str], None] = lambda run_id: None,
    on_result: Callable[[RunResult], object] = lambda result: None,
) -> RunResult:
    """Train, record everything about it, and print the answer.

    Args:
        loaded: the recipe.
        prepared: the same, ready to run.
        name: what the run is called.
        tracking: where to record it.
        parent: the comparison it belongs to, or MLflow's id of it.
        log_text: collects the log.
        train: does the work; takes what is told of minibatches and evaluations, and what takes points.
        mlflow_run_id: of the run that this one goes on with.
        on_run_id: told of MLflow's id of a new run.
        on_result: takes the result before anything is printed.
    """
    recipe, setup = prepared.recipe, prepared.setup
    facts = environment(setup.device)
    wall = recipe.engine.kind == DISTRIBUTED
    log = tracking.start(
        name, params={**loaded.flat, "train.seed": str(recipe.train.seed)}, tags=run_tags(prepared, facts),
        parent=parent, clock_scale=1.0 if wall else _clock_scale(prepared), virtual=not wall, run_id=mlflow_run_id,
        on_run_id=on_run_id, system_metrics=wall,
    )  # fmt: skip
    record_inputs(log, loaded, prepared, facts)
    if setup.clip_norm is not None and not setup.pipeline.flushes:
        _LOG.warning("without a flush gradients are clipped by each stage's own norm, not by the global one")
    result: RunResult | None = None
    try:
        result, timeline = _trained(prepared, name, log, tracking, train)
        if wall:
            result = _with_prediction(prepared, result, log)
        on_result(result)
        record_timeline(log, timeline)
    finally:
        log.text("run.log", log_text.getvalue())
        log.finish(result, status=None if result is not None else "FAILED")
    shown = timeline.warmed_up() if wall else timeline
    # A worker process ends well although nobody reads what it says any more; rich answers a broken pipe by SystemExit.
    with contextlib.suppress(OSError, SystemExit) if wall else contextlib.nullcontext():
        console.print_summary(result, pictures.text_picture(shown, width=_PICTURE_WIDTH), log.where())
    return result


def _with_prediction(prepared: Prepared, result: RunResult, log: RunLog) -> RunResult:
    """Return a result with what the simulator says of the run beside it, where that is about the device it ran on."""
    setup = prepared.setup
    if prepared.profile.source != "measured" and prepared.cluster.device not in environment(setup.device)["device"]:
        return result
    metrics = {**result.metrics}
    try:
        metrics |= compare(metrics, predicted_metrics(setup, segment_length(prepared)))
        log.text("prediction.md", prediction_markdown(metrics))
    except Exception as error:  # what was measured is worth more than what was foretold
        _LOG.warning("the run could not be predicted: %s", error)
        return result
    return replace(result, metrics=metrics)


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """Return a recipe with another seed."""
    return replace(recipe, train=replace(recipe.train, seed=seed))


def prepared_recipe(loaded: LoadedRecipe, recipe: Recipe, **how: Any) -> Prepared:
    """Prepare a recipe, showing progress.

    Args:
        loaded: where the recipe comes from.
        recipe: the same, perhaps with another seed.
        how: see `prepare`.

    Raises:
        RecipeError: the model doesn't allow it.
    """
    cluster = load_cluster(recipe.cluster.name, recipe.cluster.servers, loaded.path.parent)
    try:
        with console.preparing(recipe.name) as on_progress:
            return prepare(recipe, cluster, on_progress, **how)
    except (PlanError, GraphError, ProfileError) as error:
        raise RecipeError([Fault(loaded.source, "", str(error))]) from error


def _trained(
    prepared: Prepared,
    name: str,
    log: RunLog,
    tracking: Tracking,
    train: Callable[[Progress, Callable[[Point], None]], tuple[RunResult, Timeline]],
) -> tuple[RunResult, Timeline]:
    kind = prepared.recipe.engine.kind
    if kind == SIMULATED:
        return train(Silent(), log.point)
    tracking.wait_until_ready()  # MLflow's import would otherwise compete with the first minibatches
    total = prepared.recipe.train.max_epochs * prepared.setup.sampler.num_samples
    quiet, per_epoch = not console.is_terminal(), prepared.setup.sampler.num_samples
    clock = "wall" if kind == DISTRIBUTED else "virtual"
    with console.RunProgress(name, total, quiet=quiet, samples_per_epoch=per_epoch, clock=clock) as progress:
        return train(progress, log.point)


def _keeping(loaded: LoadedRecipe, prepared: Prepared, name: str, suite: Suite) -> tuple[Keeping, RunFolder | None]:
    """Return where a virtual run's checkpoints go: into a folder of its own if it asks for any."""
    recipe = prepared.recipe
    if suite.resumed is not None:
        found, skipped = suite.resumed.checkpoints.latest()
        for sentence in skipped:
            print(f"pipebench: {printable(sentence)}", file=sys.stderr)
        if found is None:
            raise UserError(f"--resume: run {suite.resumed.run_id} has no whole checkpoint")
        return Keeping(suite.resumed.checkpoints, found), suite.resumed
    if recipe.train.checkpoint_every is None or recipe.engine.kind == SIMULATED:
        return Keeping(), None
    folder = run_folder.create(
        name, recipe=recipe.name, recipe_yaml=recipe_yaml(loaded, recipe.train.seed), suite=suite.name,
        seed=recipe.train.seed, words=(str(loaded.path), *suite.overrides), verbose=suite.verbose,
    )  # fmt: skip
    return Keeping(folder.checkpoints), folder


def _finish_comparison(parent: RunLog, results: Sequence[RunResult], *, complete: bool) -> None:
    if results:
        parent.text("comparison.md", console.comparison_markdown(results))
        targets = {
            name for result in results for point in result.points for name in point.metrics if "loss" not in name
        }
        with tempfile.TemporaryDirectory() as folder:
            for metric in sorted(targets):
                path = Path(folder) / f"{metric}.png"
                pictures.draw_curves(results, metric, path)
                parent.file(f"{metric}.png", path)
    parent.finish(None, status="FINISHED" if complete else "KILLED")


def _clock_scale(prepared: Prepared) -> float:
    """Return the power of ten by which a run's virtual clock is stretched so that it lasts a minute or more."""
    setup = prepared.setup
    epoch_s = simulate_segment(setup, setup.sampler.minibatches_per_epoch).end_s
    return float(10 ** max(0, math.ceil(math.log10(_READABLE_S / epoch_s)))) if epoch_s > 0 else 1.0
