"""Record one run of any engine: inputs to repeat it, curves, result, timeline."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from omegaconf import OmegaConf

from pipebench.files import read_text
from pipebench.metrics import warn_of_unlisted
from pipebench.model.device import commit_diff, environment
from pipebench.model.splitting import unsplit
from pipebench.planner.plans import Comparison
from pipebench.profile.stored import write_profile
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.collected_log import CollectedLog
from pipebench.run.deciding import plan_form
from pipebench.run.identity import hardware
from pipebench.run.request import RunRequest, recipe_yaml
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.pipeline import SPLIT
from pipebench.show import console
from pipebench.show.answers import Run
from pipebench.show.progress import ProgressEvents, RunProgress, Silent, preparing
from pipebench.show.terminal import is_terminal, standard_output
from pipebench.simulate.meter import MEMORY, PLAN, PREDICTION
from pipebench.simulate.timeline import Timeline
from pipebench.tracking import mlperf
from pipebench.tracking.entries import logged_params
from pipebench.tracking.identity import identity_tags
from pipebench.tracking.inputs import Inputs
from pipebench.tracking.record import Status
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.tracking.writers import RunDescription, Writers
from pipebench.train.interfaces import OnPoint, ProgressSink
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prediction import compare, prediction_markdown
from pipebench.train.result import Point, RunResult
from pipebench.train.simulated import predicted_metrics

_LOG = logging.getLogger("pipebench.run")

_PICTURE_WIDTH = 100  # at most
Train = Callable[[ProgressSink, OnPoint], tuple[RunResult, Timeline]]


def run_title(request: RunRequest, job: Job) -> str:
    """Return a run's name in MLflow: `pipedream straight, seed 0`, in a sweep with what else varies.

    Runs made for another purpose, such as a report, begin with which one it is.
    """
    recipe, mode = job.recipe, job.recipe.parallelism.mode
    named = (mode, f"plan={job.setup.plan}", f"seed={recipe.train.seed}")
    varied = ",".join(part for part in request.loaded.varied_name.split(",") if part not in named)
    parts = filter(None, (f"{mode} {job.setup.plan}", varied, f"seed {recipe.train.seed}"))
    return f"{request.name}: {', '.join(parts)}" if request.suite.brief else ", ".join(parts)


def run_tags(job: Job, facts: Mapping[str, str]) -> dict[str, str]:
    """Return the tags to filter runs by."""
    recipe = job.recipe
    return {
        "kind": "run",
        "mode": recipe.parallelism.mode,
        "plan": str(job.setup.plan),
        "engine": recipe.engine.kind,
        "seed": str(recipe.train.seed),
        "timing": job.profile.note,
        **{f"metric.{metric}": note for metric, note in job.setup.dataset.notes().items()},
        **facts,
    }


def record_inputs(log: RunLog, loaded: LoadedRecipe, job: Job, facts: Mapping[str, str]) -> None:
    """Record all that repeats the run: recipe, profile, plan, order file, environment, uncommitted changes."""
    log.text("recipe.yaml", recipe_yaml(loaded))
    log.text("profile.json", write_profile(job.whole_profile))
    log.text("plan.json", plan_form(job).text())
    order = job.setup.pipeline.order
    if is_csv(order):
        log.text("order.csv", read_text(order))
    if job.comparison is not None:
        log.text("modes.json", _modes_json(job.comparison))
    log.text("environment.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(facts))))
    difference = commit_diff()
    if difference:
        log.text("changes.diff", difference)


def _modes_json(comparison: Comparison) -> str:
    """Return the planner's result for every mode, if the recipe left the choice to it."""
    compared = [
        {
            "mode": each.plan.mode,
            "plan": str(each.plan),
            "predicted_minibatch_s": each.minibatch_s,
            "memory_bytes": each.memory_bytes,
        }
        for each in (comparison.best, *comparison.others)
    ]
    return json.dumps({"compared": compared, "refused": comparison.refused}, indent=1)


class EndedRunInterrupt(KeyboardInterrupt):
    """Ctrl-C after a run's result was recorded; `run` has it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        super().__init__()


class RunRecorder:
    """The record of a run. Making it opens the record and records all inputs; `record` does the rest.

    Args:
        request: the run.
        job: its prepared recipe.
        tracking: where it is recorded.
        collected: the process's log.
        folder: the record's; None for a temporary one, which is removed once MLflow has everything.
        samples_done: samples that earlier processes of a resumed run have trained on.
    """

    def __init__(
        self,
        request: RunRequest,
        job: Job,
        tracking: Tracking,
        collected: CollectedLog,
        folder: Path | None = None,
        samples_done: int = 0,
    ) -> None:
        self._request, self._job, self._tracking, self._collected = request, job, tracking, collected
        self._kind = engine_kind(job.recipe)
        self._recorded: RunResult | None = None  # the result, once the record has it
        facts = {**environment(job.setup.device), **hardware()}
        self._device = facts["device"]
        title, params = run_title(request, job), logged_params(request.loaded.flat)
        self.log = tracking.start(  # what the run logs
            title,
            params=params,
            tags={"called": request.loaded.run_name, **run_tags(job, facts), **identity_tags(request.loaded)},
            parent=request.parent,
            virtual=not self._kind.measures,
            folder=folder,
            system_metrics=self._kind.measures,
            goes_on_from=samples_done,
            unique_name=folder.parent.name if folder else f"{title} {datetime.now():%Y-%m-%d %H.%M.%S.%f}",
        )
        collected.move_to(self.log.folder)
        unique = self.log.unique_name
        described = RunDescription(request.suite.name, title, unique, params, not self._kind.measures, samples_done)
        self._writers = Writers(request.loaded.recipe.tracking, described)
        self._began_ms = time.time_ns() // 1_000_000
        self.log.inputs(Inputs.of(request.loaded, job.setup.dataset))
        record_inputs(self.log, request.loaded, job, facts)

    def record(self, train: Train, forecast: MemoryForecast | None = None) -> Run:
        """Train, record the result and print it.

        Args:
            train: the training; it gets the progress display and the receiver of points.
            forecast: memory over time, which `train` fills; None to simulate it afterwards.

        Raises:
            EndedRunInterrupt: Ctrl-C came while pictures were drawn, or the record was closed.
        """
        try:
            return self._record(train, forecast)
        except KeyboardInterrupt as error:
            if self._recorded is None:
                raise
            run = Run(self._recorded, self.log.run_id, link=self.log.where(), record=self.log.folder)
            raise EndedRunInterrupt(run) from error

    def _record(self, train: Train, forecast: MemoryForecast | None) -> Run:
        log, measures = self.log, self._kind.measures
        result: RunResult | None = None
        status: Status | None = None
        shown_work = ExitStack()
        try:
            result, timeline = self._train(train)
            shown_work.enter_context(self._showing("drawing pictures and recording the run"))
            result = self._named(result)
            # Late imports: matplotlib, which takes time that no worker should spend before it trains.
            from pipebench.run import drawings
            from pipebench.show.pictures import text_picture

            forecast = forecast or self._forecast(result)
            result = self._completed(result, forecast)
            for record in self._job.setup.pipeline.hooks("record").values():
                result = record(log, result, self._job)
            self._log_result(result)
            drawings.record_run(log, self._request, self._job, result, timeline, forecast)
        except KeyboardInterrupt:
            if result is None:
                status = "KILLED"
            elif not log.has_result:  # an interrupted drawing must not lose the result, nor is it a failure
                self._record_result(result)
            raise
        finally:
            with shown_work:
                self._writers.finish(result)
                self._collected.save(log)
                log.finish(status=status)
        shown = timeline.warmed_up() if measures else timeline
        width = min(_PICTURE_WIDTH, standard_output().width - 2)
        made = Run(result, log.run_id, shown, text_picture(shown, width=width), log.where(), log.folder)
        if self._request.suite.prints:
            self._print(made)
        return made

    def _showing(self, work: str) -> AbstractContextManager[object]:
        """Show what the run does, if that lasts and progress is printed."""
        return nullcontext() if self._request.suite.is_quiet else preparing(self._request.name, work=work)

    def _print(self, made: Run) -> None:
        # A worker must end normally even if nothing reads its output. rich raises SystemExit for a broken pipe.
        with contextlib.suppress(OSError, SystemExit) if self._kind.in_processes else nullcontext():
            if self._request.is_one_of_many:
                console.print_outcome(made.result)
            else:
                made.print_to(standard_output())

    def _log_result(self, result: RunResult) -> None:
        warn_of_unlisted(result.metrics)
        self._record_result(result)
        if result.points and self._kind.trains:
            setup = self._job.setup
            samples = setup.sampler.num_samples, setup.dataset.num_eval
            self.log.text(mlperf.FILE, mlperf.mlperf_log(result, *samples, self._began_ms))

    def _record_result(self, result: RunResult) -> None:
        self.log.result(result)
        self._recorded = result

    def _named(self, result: RunResult) -> RunResult:
        """Return a result with its recipe."""
        loaded = self._request.loaded
        return replace(result, name=loaded.run_name, recipe=loaded.flat, varied=loaded.varied)

    def _completed(self, result: RunResult, forecast: MemoryForecast | None) -> RunResult:
        """Return a result with all notes and its prediction."""
        setup, notes = self._job.setup, {**result.notes}
        if setup.pipeline.backward == SPLIT and (whole := unsplit(setup.graph)):
            unsplittable = f"backwards that can't be split run whole, in the input part: {whole}"
            notes[PLAN] = "; ".join(filter(None, (notes.get(PLAN), unsplittable)))
        if forecast is not None and forecast.out_of_memory:
            notes[MEMORY] = forecast.out_of_memory
            _LOG.warning("%s", forecast.out_of_memory)
        result = replace(result, notes=notes)
        return self._with_prediction(result) if self._kind.measures else result

    def _train(self, train: Train) -> tuple[RunResult, Timeline]:
        if not self._kind.trains:
            with self._showing("simulating"):
                return train(Silent(), self._point)
        if self._kind.measures:
            self._tracking.wait_until_ready()  # MLflow's import would otherwise compete with the first minibatches
        per_epoch = self._job.setup.sampler.num_samples
        suite = self._request.suite
        if suite.on_progress is not None:
            return train(ProgressEvents(self._request.name, suite.on_progress), self._point)
        with RunProgress(
            self._request.name,
            self._job.recipe.train.max_epochs * per_epoch,
            quiet=suite.brief or not is_terminal(),
            samples_per_epoch=per_epoch,
            clock=self._kind.clock,
        ) as progress:
            return train(progress, self._point)

    def _point(self, point: Point) -> None:
        if self.log.point(point):
            self._writers.point(point)

    def _forecast(self, result: RunResult) -> MemoryForecast | None:
        """Return simulated memory and occupancy over time, if available."""
        try:
            job = self._job
            for extended in job.setup.pipeline.hooks("forecast").values():  # of several, the first
                found: MemoryForecast = extended(job, result.moves)
                return found
            return MemoryForecast(job)
        except Exception as error:  # a failed prediction must not lose the training's result
            _LOG.warning("memory over time could not be simulated: %s", error)
            return None

    def _with_prediction(self, result: RunResult) -> RunResult:
        """Return a result with the simulator's prediction, if that is for the device and the stages of the run."""
        job, note = self._job, result.notes.get(PREDICTION, "")
        unpredicted = replace(result, notes={fact: text for fact, text in result.notes.items() if fact != PREDICTION})
        is_measured_here = job.profile.source == "measured" or job.cluster.device in self._device
        keeps_first_stages = not result.moves and result.search is None  # the prediction is for these
        if not (is_measured_here and keeps_first_stages):
            return unpredicted
        metrics = {**result.metrics}
        try:
            metrics |= compare(metrics, predicted_metrics(job.setup, job.periods))
            self.log.text("prediction.md", prediction_markdown(metrics, note))
        except Exception as error:  # a failed prediction must not lose the training's result
            _LOG.warning("the run could not be predicted: %s", error)
            return unpredicted
        return replace(result, metrics=metrics)
