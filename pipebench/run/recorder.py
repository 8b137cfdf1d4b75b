"""Records one run, whatever engine trains it, and prints its answer."""

import contextlib
import io
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipebench.model.device import environment
from pipebench.recipe.engines import engine_kind
from pipebench.run.artifacts import record_inputs, record_timeline, run_tags
from pipebench.run.request import RunRequest
from pipebench.show import console, pictures
from pipebench.show.progress import RunProgress, Silent
from pipebench.show.terminal import is_terminal, standard_output
from pipebench.simulate.meter import PREDICTION
from pipebench.simulate.timeline import Timeline
from pipebench.tracking import Tracking, logged_params
from pipebench.train.interfaces import OnPoint, Progress
from pipebench.train.periods import Periods
from pipebench.train.prediction import compare, prediction_markdown
from pipebench.train.prepare import Job
from pipebench.train.result import RunResult
from pipebench.train.simulated import predicted_metrics

_LOG = logging.getLogger("pipebench.run")
_PICTURE_WIDTH = 100  # at most

Train = Callable[[Progress, OnPoint], tuple[RunResult, Timeline]]


class RunRecorder:
    """The record of a run, opened with everything it takes to run it again; `record` does the rest.

    Args:
        request: the run.
        job: the same, ready to run.
        tracking: where to record it.
        log_text: collects the log.
        folder: where the record is kept; None for a place that is removed once MLflow has everything.

    Attributes:
        log: what the run logs.
    """

    def __init__(
        self, request: RunRequest, job: Job, tracking: Tracking, log_text: io.StringIO, folder: Path | None = None
    ) -> None:
        self._request, self._job, self._tracking, self._log_text = request, job, tracking, log_text
        self._kind = engine_kind(job.recipe)
        facts = environment(job.setup.device)
        self._device = facts["device"]
        self.log = tracking.start(
            request.name,
            params=logged_params(request.loaded.flat),
            tags=run_tags(job, facts),
            parent=request.parent,
            virtual=not self._kind.measures,
            folder=folder,
            system_metrics=self._kind.measures,
        )
        record_inputs(self.log, request.loaded, job, facts)

    def record(self, train: Train) -> RunResult:
        """Train, record the answer and print it.

        Args:
            train: does the work; takes what is told of minibatches and evaluations, and what takes points.
        """
        setup, log, measures = self._job.setup, self.log, self._kind.measures
        if setup.clip_norm is not None and not setup.pipeline.flushes:
            _LOG.warning("without a flush gradients are clipped by each stage's own norm, not by the global one")
        try:
            result, timeline = self._train(train)
            result = replace(result, recipe=self._request.loaded.flat)
            if measures:
                result = self._with_prediction(result)
            log.result(result)
            record_timeline(log, timeline)
        finally:
            log.text("run.log", self._log_text.getvalue())
            log.finish()
        shown = timeline.warmed_up() if measures else timeline
        # A worker process ends well although nobody reads what it says any more; rich answers a broken pipe by
        # SystemExit.
        with contextlib.suppress(OSError, SystemExit) if self._kind.in_processes else contextlib.nullcontext():
            width = min(_PICTURE_WIDTH, standard_output().width - 2)
            console.print_summary(result, pictures.text_picture(shown, width=width), log.where())
        return result

    def _train(self, train: Train) -> tuple[RunResult, Timeline]:
        if not self._kind.trains:
            return train(Silent(), self.log.point)
        self._tracking.wait_until_ready()  # MLflow's import would otherwise compete with the first minibatches
        per_epoch = self._job.setup.sampler.num_samples
        with RunProgress(
            self._request.name,
            self._job.recipe.train.max_epochs * per_epoch,
            quiet=not is_terminal(),
            samples_per_epoch=per_epoch,
            clock=self._kind.clock,
        ) as progress:
            return train(progress, self.log.point)

    def _with_prediction(self, result: RunResult) -> RunResult:
        """Return a result with what the simulator says beside it, where that is about the device it ran on."""
        job, note = self._job, result.notes.get(PREDICTION, "")
        unpredicted = replace(result, notes={fact: text for fact, text in result.notes.items() if fact != PREDICTION})
        if job.profile.source != "measured" and job.cluster.device not in self._device:
            return unpredicted
        per_epoch = job.setup.sampler.minibatches_per_epoch
        longest = min(per_epoch, Periods.of(job.recipe.train, per_epoch).longest_segment)
        metrics = {**result.metrics}
        try:
            metrics |= compare(metrics, predicted_metrics(job.setup, longest))
            self.log.text("prediction.md", prediction_markdown(metrics, note))
        except Exception as error:  # what was measured is worth more than what was foretold
            _LOG.warning("the run could not be predicted: %s", error)
            return unpredicted
        return replace(result, metrics=metrics)
