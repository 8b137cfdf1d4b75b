"""Runs recipes: prepares each, trains or simulates it, records it, and prints the answer.

Experiment = suite, parent run = comparison (or the seeds of one recipe), child = one run of one recipe.
"""

import contextlib
import io
import itertools
import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipebench.checkpoint.store import Checkpoints
from pipebench.engine.gate import StopRequest
from pipebench.engine.stopping import stopping_on_signals
from pipebench.errors import UserError, printable
from pipebench.model.device import environment, torch_settings
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.recipe.schema import Recipe
from pipebench.run import folder as run_folder
from pipebench.run.deciding import decided_apart, measures_on_gpu
from pipebench.run.decision import decision_of, kept_decision
from pipebench.run.processes import RunRequest, run_in_processes
from pipebench.run.recording import collected_log, recipe_yaml, record_inputs, record_timeline, run_tags
from pipebench.run.suite import Suite
from pipebench.show import console, pictures
from pipebench.show.progress import Silent
from pipebench.simulate.drawing import draw as draw_schedule
from pipebench.simulate.meter import PREDICTION
from pipebench.simulate.timeline import Timeline
from pipebench.tracking import RunLog, Tracking, logged_params, require_writable, seed_medians, summarise_seeds
from pipebench.train.checkpointing import CheckpointPolicy
from pipebench.train.interfaces import Progress
from pipebench.train.loop import TrainingLoop
from pipebench.train.periods import Periods
from pipebench.train.prediction import compare, prediction_markdown
from pipebench.train.prepare import Decision, Job, prepare
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult
from pipebench.train.resume import newest, nothing_to_go_on_from
from pipebench.train.simulated import predicted_metrics, simulate_epoch
from pipebench.train.virtual import on_virtual_clock

_LOG = logging.getLogger("pipebench.run")
_PICTURE_WIDTH = 100  # at most
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
        UserError: what the runs come to could be recorded nowhere.
        WorkersFailedError: processes ended without a result.
    """
    require_writable()
    several = len(loaded) > 1
    # What only the traced model shows to be wrong must come out before the first recipe runs.
    decisions = [_checked(each, suite, alone=not several) for each in loaded]
    processes_only = all(engine_kind(each.recipe).in_processes for each in loaded)
    # Where all there is to record is recorded by the processes, this one has no use for MLflow.
    tracking = None if processes_only and not several and len(seeds or [0]) == 1 else Tracking(suite.name)
    comparison = {"kind": "comparison"}
    total, numbers = len(loaded) * len(seeds or [0]), itertools.count(1)

    def begin(name: str) -> None:
        if total > 1:
            console.print_position(next(numbers), total, name)

    parent = tracking.start(suite.name, params={}, tags=comparison, virtual=False) if several and tracking else None
    results: list[RunResult] = []
    try:
        for each, decision in zip(loaded, decisions, strict=True):
            results += _run_with_seeds(each, decision, seeds, suite, tracking, parent, begin)
            if results[-1].outcome == INTERRUPTED:
                break
    finally:
        if parent is not None:
            _finish_comparison(parent, results, complete=len(results) == total)
    if several:
        console.print_comparison(results, parent.where() if parent else "")
    elif len(results) > 1:
        console.print_seeds(results[0].name, results, summarise_seeds(results))
    worst = min(results, key=lambda result: _WORST_FIRST.index(result.outcome))
    return worst.exit_code


def draw(loaded: LoadedRecipe) -> str:
    """Return the start of a recipe's pipeline as text, in units of a fast stage's forward time, links free."""
    job = prepare_job(loaded, loaded.recipe, trains=False)
    setup = job.setup
    travels = max(setup.costs.stages[0].forward_s)
    forward = [stage.forward_s[travels] for stage in setup.costs.stages]
    backward = [stage.backward_s[travels] for stage in setup.costs.stages]
    unit_s = min(value for value in (*forward, *backward) if value > 0)
    cells = [[max(1, round(value / unit_s)) for value in row] for row in (forward, backward)]
    rounds = max(setup.pipeline.round_size(0), setup.pipeline.block * max(setup.pipeline.warmups) * 2)
    title = f"{loaded.recipe.parallelism.mode}, plan {setup.plan}, one column = {unit_s:.3g} s, links free"
    width = console.standard_output().width if console.is_terminal() else None
    return f"{title}\n{draw_schedule(setup.pipeline, rounds, cells[0], cells[1], width=width)}"


def _checked(loaded: LoadedRecipe, suite: Suite, *, alone: bool) -> Decision | None:
    """Return what is decided for all processes of a run, with every seed; None where one process runs it."""
    if engine_kind(loaded.recipe).in_processes:
        kept = kept_decision(suite.resumed, suite.overrides)
        return kept or decision_of(prepare_job(loaded, loaded.recipe, trains=False, apart=True))
    if not alone:
        prepare_job(loaded, loaded.recipe, trains=False)
    return None


def _run_with_seeds(
    loaded: LoadedRecipe,
    decision: Decision | None,
    seeds: Sequence[int] | None,
    suite: Suite,
    tracking: Tracking | None,
    parent: RunLog | None,
    begin: Callable[[str], None],
) -> list[RunResult]:
    name = loaded.recipe.name
    if seeds is None or len(seeds) == 1:
        begin(name)
        seed = loaded.recipe.train.seed if seeds is None else seeds[0]
        return [_run_one(loaded, decision, seed, name, suite, tracking, parent)]
    assert tracking is not None
    group = tracking.start(
        name, params=logged_params(loaded.flat), tags={"kind": "seeds"}, parent=parent, virtual=False
    )
    results: list[RunResult] = []
    try:
        for seed in seeds:
            begin(f"{name}-seed{seed}")
            results.append(_run_one(loaded, decision, seed, f"{name}-seed{seed}", suite, tracking, group))
            if results[-1].outcome == INTERRUPTED:
                break
    finally:
        if results:
            group.metrics(summarise_seeds(results) | seed_medians(results))
        _finish_comparison(group, results, complete=len(results) == len(seeds))
    return results


def _run_one(
    loaded: LoadedRecipe,
    decision: Decision | None,
    seed: int,
    name: str,
    suite: Suite,
    tracking: Tracking | None,
    parent: RunLog | None,
) -> RunResult:
    recipe = with_seed(loaded.recipe, seed)
    kind = engine_kind(recipe)
    if kind.in_processes:
        job = prepare_job(loaded, recipe, tells=True, trains=False, kept=decision)
        reference = str(suite.resumed.recipe_path if suite.resumed else loaded.path)
        request = RunRequest((reference, *suite.overrides), suite.name, suite.verbose, suite.resumed)
        if suite.resumed is not None:
            request = replace(request, words=suite.overrides)
        parent_id = parent.wait_for_id() if parent is not None else None
        return run_in_processes(loaded, job, name, request, parent_id)
    assert tracking is not None
    with collected_log(suite.verbose) as log_text, torch_settings(recipe.engine):
        job = prepare_job(loaded, recipe, tells=True)
        if not kind.trains:
            return recorded_run(
                loaded, job, name, tracking, parent, log_text, lambda *_: simulate_epoch(job)
            )  # fmt: skip
        folder = _LateFolder(loaded, job, name, suite)
        policy, stop = folder.policy(), StopRequest()

        def train(progress: Progress, on_point: Callable[[Point], None]) -> tuple[RunResult, Timeline]:
            with stopping_on_signals(stop):
                return TrainingLoop(job, on_virtual_clock(job, stop), progress, on_point, policy).run()

        result = recorded_run(
            loaded, job, name, tracking, parent, log_text, train,
            mlflow_run_id=folder.mlflow_run_id, on_run_id=folder.keep_mlflow_run_id,
        )  # fmt: skip
    if result.outcome == INTERRUPTED and folder.made is not None:
        folder.made.say_how_to_go_on(suite.overrides if suite.resumed is not None else ())
    return result


def recorded_run(
    loaded: LoadedRecipe,
    job: Job,
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
        job: the same, ready to run.
        name: what the run is called.
        tracking: where to record it.
        parent: the comparison it belongs to, or MLflow's id of it.
        log_text: collects the log.
        train: does the work; takes what is told of minibatches and evaluations, and what takes points.
        mlflow_run_id: of the run that this one goes on with.
        on_run_id: told of MLflow's id of a new run.
        on_result: takes the result before anything is printed.
    """
    recipe, setup = job.recipe, job.setup
    facts = environment(setup.device)
    wall = engine_kind(recipe).measures
    flat = {**loaded.flat, "train.seed": str(recipe.train.seed)}
    log = tracking.start(
        name, params=logged_params(flat), tags=run_tags(job, facts), parent=parent, virtual=not wall,
        run_id=mlflow_run_id, on_run_id=on_run_id, system_metrics=wall,
    )  # fmt: skip
    record_inputs(log, loaded, job, facts)
    if setup.clip_norm is not None and not setup.pipeline.flushes:
        _LOG.warning("without a flush gradients are clipped by each stage's own norm, not by the global one")
    result: RunResult | None = None
    try:
        result, timeline = _trained(job, name, log, tracking, train)
        result = replace(result, recipe=flat)
        if wall:
            result = _with_prediction(job, result, log)
        on_result(result)
        record_timeline(log, timeline)
    finally:
        log.text("run.log", log_text.getvalue())
        log.finish(result, status=None if result is not None else "FAILED")
    shown = timeline.warmed_up() if wall else timeline
    # A worker process ends well although nobody reads what it says any more; rich answers a broken pipe by SystemExit.
    with contextlib.suppress(OSError, SystemExit) if wall else contextlib.nullcontext():
        width = min(_PICTURE_WIDTH, console.standard_output().width - 2)
        console.print_summary(result, pictures.text_picture(shown, width=width), log.where())
    return result


def _with_prediction(job: Job, result: RunResult, log: RunLog) -> RunResult:
    """Return a result with what the simulator says of the run beside it, where that is about the device it ran on."""
    setup = job.setup
    unpredicted = replace(result, notes={fact: note for fact, note in result.notes.items() if fact != PREDICTION})
    if job.profile.source != "measured" and job.cluster.device not in environment(setup.device)["device"]:
        return unpredicted
    metrics = {**result.metrics}
    per_epoch = setup.sampler.minibatches_per_epoch
    longest = min(per_epoch, Periods.of(job.recipe.train, per_epoch).longest_segment)
    try:
        metrics |= compare(metrics, predicted_metrics(setup, longest))
        log.text("prediction.md", prediction_markdown(metrics, result.notes.get(PREDICTION, "")))
    except Exception as error:  # what was measured is worth more than what was foretold
        _LOG.warning("the run could not be predicted: %s", error)
        return unpredicted
    return replace(result, metrics=metrics)


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """Return a recipe with another seed."""
    return replace(recipe, train=replace(recipe.train, seed=seed))


def prepare_job(loaded: LoadedRecipe, recipe: Recipe, *, apart: bool = False, tells: bool = False, **how: Any) -> Job:
    """Prepare a recipe, showing progress.

    Args:
        loaded: where the recipe comes from.
        recipe: the same, perhaps with another seed.
        tells: say so in plain lines where there is no terminal.
        apart: this process isn't to touch a GPU: where the profile is measured on one, another process decides.
        how: see `prepare`.

    Raises:
        RecipeError: the model doesn't allow it.
        WorkersFailedError: the process that decides ended without an answer.
    """
    cluster = load_cluster(recipe.cluster.name, recipe.cluster.servers, loaded.path.parent)
    with faults_of(loaded), console.preparing(recipe.name, tells=tells) as on_progress:
        if apart and measures_on_gpu(recipe, cluster):
            how["kept"] = decided_apart(recipe, cluster, on_progress)
        return prepare(recipe, cluster, on_progress, **how)


def _trained(
    job: Job,
    name: str,
    log: RunLog,
    tracking: Tracking,
    train: Callable[[Progress, Callable[[Point], None]], tuple[RunResult, Timeline]],
) -> tuple[RunResult, Timeline]:
    kind = engine_kind(job.recipe)
    if not kind.trains:
        return train(Silent(), log.point)
    tracking.wait_until_ready()  # MLflow's import would otherwise compete with the first minibatches
    total = job.recipe.train.max_epochs * job.setup.sampler.num_samples
    quiet, per_epoch = not console.is_terminal(), job.setup.sampler.num_samples
    with console.RunProgress(name, total, quiet=quiet, samples_per_epoch=per_epoch, clock=kind.clock) as progress:
        return train(progress, log.point)


class _LateFolder:
    """The folder of a virtual run: made at the start if the recipe asks for checkpoints, else once it is stopped.

    Attributes:
        made: the folder, once there is one.
        mlflow_run_id: MLflow's id of the run, as far as it is known.
    """

    def __init__(self, loaded: LoadedRecipe, job: Job, name: str, suite: Suite) -> None:
        self._loaded, self._job, self._name, self._suite = loaded, job, name, suite
        self._changing = threading.Lock()
        self.made = suite.resumed
        self.mlflow_run_id = None if self.made is None else self.made.read().mlflow_run_id

    def policy(self) -> CheckpointPolicy:
        """Return where the run's checkpoints go, and where it goes on.

        Raises:
            UserError: it is to go on, and has no checkpoint that can be used.
        """
        if self.made is not None:
            found, skipped = newest(self.made.checkpoints, self._job)
            if found is None:
                raise nothing_to_go_on_from(self.made.run_id, skipped)
            for sentence in skipped:
                print(f"pipebench: {printable(sentence)}", file=sys.stderr)
            return CheckpointPolicy(self.made.checkpoints, found)
        if self._job.recipe.train.checkpoint_every is None:
            return CheckpointPolicy(when_stopped=self._make_late)
        return CheckpointPolicy(self._make())

    def keep_mlflow_run_id(self, run_id: str) -> None:
        """Note MLflow's id of the run, in the folder as soon as there is one."""
        with self._changing:
            self.mlflow_run_id = run_id
            if self.made is not None:
                self.made.keep_mlflow_run_id(run_id)

    def _make_late(self) -> Checkpoints | None:
        """Make the folder of a run that is being stopped; what was trained is worth more than that."""
        try:
            return self._make()
        except UserError as error:
            print(f"pipebench: no checkpoint is kept: {printable(str(error))}", file=sys.stderr)
            return None

    def _make(self) -> Checkpoints:
        recipe, suite = self._job.recipe, self._suite
        made = run_folder.create(
            self._name, recipe=recipe.name, recipe_yaml=recipe_yaml(self._loaded, recipe.train.seed), suite=suite.name,
            seed=recipe.train.seed, words=(str(self._loaded.path), *suite.overrides), verbose=suite.verbose,
            code_folders=self._loaded.folders,
        )  # fmt: skip
        with self._changing:  # MLflow's id may come in another thread now
            self.made = made
            if self.mlflow_run_id is not None:
                made.keep_mlflow_run_id(self.mlflow_run_id)
        return made.checkpoints


def _finish_comparison(parent: RunLog, results: Sequence[RunResult], *, complete: bool) -> None:
    """Keep table and curves of a comparison, or of a recipe's seeds, where people look first, and close its record."""
    if results:
        markdown = console.comparison_markdown(results)
        parent.text("comparison.md", markdown)
        parent.describe(markdown, _record_curves(parent, results))
    parent.finish(None, status="FINISHED" if complete else "KILLED")


def _record_curves(log: RunLog, results: Sequence[RunResult]) -> list[str]:
    """Keep a picture of every metric's curves; return the names of the pictures."""
    metrics = {name for result in results for point in result.points for name in point.metrics if "loss" not in name}
    drawn = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for metric in sorted(metrics):
                path = Path(folder) / f"{metric}.png"
                pictures.draw_curves(results, metric, path)
                log.file(path.name, path)
                drawn.append(path.name)
    except (OSError, ValueError) as error:  # a picture must never cost a result
        _LOG.warning("the curves could not be drawn: %s", error)
    return drawn
