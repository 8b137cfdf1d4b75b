"""Runs recipes: prepares each, trains or simulates it, records it, and prints the answer.

Experiment = suite, parent run = comparison (or the seeds of one recipe), child = one run of one recipe.
"""

import io
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipebench import console, pictures
from pipebench.device import commit_diff, environment, torch_settings
from pipebench.errors import Fault, GraphError, PlanError, ProfileError, RecipeError
from pipebench.prepare import SIMULATED, Prepared, prepare
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import LoadedRecipe
from pipebench.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, RunResult
from pipebench.schedule.drawing import draw as draw_schedule
from pipebench.simulated import simulate_epoch
from pipebench.steady import simulate_segment
from pipebench.timeline import Timeline
from pipebench.trace import write_trace
from pipebench.tracking import RunLog, Tracking, summarise_seeds
from pipebench.training import train_to_target

_LOG = logging.getLogger("pipebench.run")
_READABLE_S = 60.0  # shorter virtual runs are stretched in MLflow's timestamps, which are whole milliseconds
_PICTURE_WIDTH = 100
_WORST_FIRST = (INTERRUPTED, DIVERGED, MISSED, COMPLETED, REACHED)


def run_recipes(loaded: Sequence[LoadedRecipe], *, seeds: Sequence[int] | None, verbose: bool, suite: str) -> int:
    """Run every recipe, once per seed; print and record the answers.

    Args:
        loaded: validated recipes.
        seeds: seeds to run each with; None for the recipe's own.
        verbose: log every instruction, with worker and virtual time.
        suite: names the MLflow experiment.

    Returns:
        The worst exit code of the runs.
    """
    if len(loaded) > 1:  # what only the traced model shows to be wrong must come out before the first recipe runs
        for each in loaded:
            _prepare(each, each.recipe.train.seed, trains=False)
    tracking = Tracking(suite)
    several = len(loaded) > 1
    parent = tracking.start(suite, params={}, tags={"kind": "comparison"}, virtual=False) if several else None
    results: list[RunResult] = []
    try:
        for each in loaded:
            results += _run_with_seeds(each, seeds, verbose, tracking, parent)
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
    prepared = _prepare(loaded, loaded.recipe.train.seed, trains=False)
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
    loaded: LoadedRecipe, seeds: Sequence[int] | None, verbose: bool, tracking: Tracking, parent: RunLog | None
) -> list[RunResult]:
    name = loaded.recipe.name
    if seeds is None or len(seeds) == 1:
        seed = loaded.recipe.train.seed if seeds is None else seeds[0]
        return [_run_one(loaded, seed, name, verbose, tracking, parent)]
    group = tracking.start(name, params=loaded.flat, tags={"kind": "seeds"}, parent=parent, virtual=False)
    results: list[RunResult] = []
    try:
        for seed in seeds:
            results.append(_run_one(loaded, seed, f"{name}-seed{seed}", verbose, tracking, group))
            if results[-1].outcome == INTERRUPTED:
                break
    finally:
        spread = summarise_seeds(results) if results else {}
        group.metrics(spread)
        group.finish(None, status="FINISHED" if len(results) == len(seeds) else "KILLED")
    console.print_seeds(name, results, spread)
    return results


def _run_one(
    loaded: LoadedRecipe, seed: int, name: str, verbose: bool, tracking: Tracking, parent: RunLog | None
) -> RunResult:
    with _logging(verbose) as log_text, torch_settings(loaded.recipe.engine):
        prepared = _prepare(loaded, seed)
        recipe = prepared.recipe
        facts = environment(prepared.setup.device)
        tags = {
            "kind": "run",
            "mode": recipe.parallelism.mode,
            "plan": str(prepared.setup.plan),
            "engine": recipe.engine.kind,
            "seed": str(seed),
            "timing": prepared.profile.note,
            **{f"metric.{metric}": note for metric, note in prepared.setup.dataset.notes().items()},
            **facts,
        }
        params = {**loaded.flat, "train.seed": str(seed)}
        log = tracking.start(name, params=params, tags=tags, parent=parent, clock_scale=_clock_scale(prepared))
        _record_inputs(log, loaded, prepared, facts)
        if prepared.setup.clip_norm is not None and not prepared.setup.pipeline.flushes:
            _LOG.warning("without a flush gradients are clipped by each stage's own norm, not by the global one")
        result: RunResult | None = None
        try:
            result, timeline = _execute(prepared, name, log, tracking)
            _record_timeline(log, timeline)
        finally:
            log.text("run.log", log_text.getvalue())
            log.finish(result, status=None if result is not None else "FAILED")
    console.print_summary(result, pictures.text_picture(timeline, width=_PICTURE_WIDTH), log.where())
    return result


def _prepare(loaded: LoadedRecipe, seed: int, *, trains: bool = True) -> Prepared:
    recipe = replace(loaded.recipe, train=replace(loaded.recipe.train, seed=seed))
    cluster = load_cluster(recipe.cluster.name, recipe.cluster.servers, loaded.path.parent)
    try:
        with console.preparing(recipe.name) as on_progress:
            return prepare(recipe, cluster, on_progress, trains=trains)
    except (PlanError, GraphError, ProfileError) as error:
        raise RecipeError([Fault(loaded.source, "", str(error))]) from error


def _execute(prepared: Prepared, name: str, log: RunLog, tracking: Tracking) -> tuple[RunResult, Timeline]:
    if prepared.recipe.engine.kind == SIMULATED:
        return simulate_epoch(prepared)
    tracking.wait_until_ready()  # MLflow's import would otherwise compete with the first minibatches
    total = prepared.recipe.train.max_epochs * prepared.setup.sampler.num_samples
    quiet, per_epoch = not console.is_terminal(), prepared.setup.sampler.num_samples
    with console.RunProgress(name, total, quiet=quiet, samples_per_epoch=per_epoch) as progress:
        return train_to_target(prepared, progress, log.point)


def _clock_scale(prepared: Prepared) -> float:
    """Return the power of ten by which a run's virtual clock is stretched so that it lasts a minute or more."""
    setup = prepared.setup
    epoch_s = simulate_segment(setup, setup.sampler.minibatches_per_epoch).end_s
    return float(10 ** max(0, math.ceil(math.log10(_READABLE_S / epoch_s)))) if epoch_s > 0 else 1.0


def _record_inputs(log: RunLog, loaded: LoadedRecipe, prepared: Prepared, facts: Mapping[str, str]) -> None:
    """Keep everything it takes to run this again: recipe, profile, plan, environment, uncommitted changes."""
    config: Any = OmegaConf.to_container(loaded.config, resolve=False)
    config["train"]["seed"] = prepared.recipe.train.seed
    log.text("recipe.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
    log.text("profile.json", prepared.profile.to_json())
    log.text("plan.json", _plan_json(prepared))
    log.text("environment.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(facts))))
    difference = commit_diff()
    if difference:
        log.text("changes.diff", difference)


def _plan_json(prepared: Prepared) -> str:
    setup = prepared.setup
    names = [layer.name for layer in setup.graph.layers]
    stages = [{"layers": names[s.start : s.stop], "replicas": s.replicas} for s in setup.plan.stages]
    depths = list(setup.pipeline.warmups)
    told: dict[str, Any] = {"plan": str(setup.plan), "stages": stages, "depths": depths}
    told["devices"] = [setup.cluster.device_of(worker) for worker in range(setup.pipeline.num_workers)]
    if prepared.comparison is not None:
        told["modes_compared"] = [
            {
                "mode": each.mode,
                "plan": each.config,
                "predicted_minibatch_s": each.minibatch_s,
                "memory_bytes": max(stage.memory_bytes for stage in each.stages),
            }
            for each in (prepared.comparison.best, *prepared.comparison.others)
        ]
        told["modes_refused"] = prepared.comparison.refused
    return json.dumps(told, indent=1)


def _record_timeline(log: RunLog, timeline: Timeline) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder:
            for artifact, write in (("timeline.png", pictures.draw_timeline), ("trace.json", write_trace)):
                path = Path(folder) / artifact
                write(timeline, path)
                log.file(artifact, path)
    except (OSError, ValueError) as error:  # a picture must never cost a result
        _LOG.warning("the timeline could not be drawn: %s", error)


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


@contextmanager
def _logging(verbose: bool) -> Iterator[io.StringIO]:
    """Collect pipebench's log (and torch's warnings) for the artifact; show it too when verbose."""
    text = io.StringIO()
    root = logging.getLogger("pipebench")
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handlers: list[logging.Handler] = [handler, *([logging.StreamHandler()] if verbose else [])]
    level, captured = root.level, logging.getLogger("py.warnings")
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.captureWarnings(True)
    for each in handlers:
        root.addHandler(each)
        captured.addHandler(each)
    try:
        with warnings.catch_warnings():
            yield text
    finally:
        logging.captureWarnings(False)
        for each in handlers:
            root.removeHandler(each)
            captured.removeHandler(each)
        root.setLevel(level)
