"""Runs with all workers in this process: simulated, or trained on a virtual clock."""

from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from pipebench.checkpoint.store import Checkpoints
from pipebench.engine.admission import StopRequest, stopping_on_signals
from pipebench.errors import UserError, print_notice
from pipebench.model.device import torch_settings
from pipebench.model.heap import keep_freed_blocks
from pipebench.recipe.users_code import during
from pipebench.run.collected_log import collected_log
from pipebench.run.deciding import prepare_job
from pipebench.run.folder import RunFolder
from pipebench.run.identity import checkpoints_of, identity_of, resumed_from, samples_of
from pipebench.run.lock import locked
from pipebench.run.recorder import EndedRunInterrupt, RunRecorder
from pipebench.run.request import RunRequest
from pipebench.show.answers import Run
from pipebench.simulate.timeline import Timeline
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.train.checkpointing import CheckpointPolicy
from pipebench.train.engines import on_virtual_clock, simulate
from pipebench.train.interfaces import OnPoint, ProgressSink
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.result import RunResult


def run_simulated(request: RunRequest, tracking: Tracking) -> Run:
    """Run a recipe for its durations only, record that by `tracking`, and print it."""
    loaded = request.loaded
    with collected_log(request.suite.verbose) as collected, torch_settings(loaded.recipe.engine):
        job = prepare_job(loaded, prints_lines=True, silent=request.suite.is_quiet)
        forecast = MemoryForecast(job)
        recorder = RunRecorder(request, job, tracking, collected)

        def simulated(_: ProgressSink, on_point: OnPoint) -> tuple[RunResult, Timeline]:
            result, timeline = simulate(job, forecast)
            for point in result.points:
                on_point(point)
            return result, timeline

        return recorder.record(simulated, forecast)


def run_virtual(request: RunRequest, tracking: Tracking) -> Run:
    """Train a recipe with real arithmetic on a virtual clock, record that by `tracking`, and print it."""
    suite = request.suite
    keep_freed_blocks()
    settings = torch_settings(request.loaded.recipe.engine)
    with ExitStack() as held, collected_log(suite.verbose) as collected, settings, during(request.name):
        job = prepare_job(request.loaded, prints_lines=True, silent=suite.is_quiet)
        folder, stop = _LateFolder(request, held), StopRequest()
        policy = folder.policy(job)
        recorder = RunRecorder(request, job, tracking, collected, folder.record_path, policy.samples_done)
        folder.log = recorder.log

        def train(progress: ProgressSink, on_point: OnPoint) -> tuple[RunResult, Timeline]:
            with stopping_on_signals(stop):
                return TrainingLoop(job, on_virtual_clock(job, stop), progress, on_point, policy).run()

        interrupt: EndedRunInterrupt | None = None
        try:
            made = recorder.record(train)
        except EndedRunInterrupt as error:
            made, interrupt = error.run, error
        except KeyboardInterrupt:
            if folder.made is not None:
                folder.made.say_how_to_go_on(suite.changes)
            raise
    if folder.made is not None:
        prints = suite.prints and not request.is_one_of_many
        folder.made.finish(made.result, suite.changes, job.recipe.train.checkpoint_keep, prints=prints)
    if interrupt is not None:
        raise interrupt
    return made


class _LateFolder:
    """The folder of a virtual run: made at the start if the recipe asks for checkpoints, else with the first one.

    Args:
        request: the run.
        held: closed at the run's end; it holds the lock on the folder until then.
    """

    def __init__(self, request: RunRequest, held: ExitStack) -> None:
        self._request, self._held = request, held
        self.made = request.suite.resumed  # the folder, None before it exists
        self.log: RunLog | None = None  # the run's; moved into the folder when that is made

    @property
    def record_path(self) -> Path | None:
        """Folder of the run's record, None before it exists."""
        return None if self.made is None else self.made.record_path

    def policy(self, job: Job) -> CheckpointPolicy:
        """Return where checkpoints go and from which one to resume; raises a UserError if none is usable for that."""
        if self.made is not None:
            self._held.enter_context(locked(self.made.path))
            checkpoints = self._checkpoints(self.made, job, samples_of(job))
            return CheckpointPolicy(checkpoints, resumed_from(self.made, checkpoints, job))
        if job.recipe.train.checkpoint_every is None:
            keeps = job.recipe.train.checkpoint_keep > 0 and not self._request.suite.brief
            return CheckpointPolicy(late=cache(partial(self._make_late, job, samples_of(job))), keeps=keeps)
        return CheckpointPolicy(self._checkpoints(self._make(), job, samples_of(job)))

    def _make(self) -> RunFolder:
        """Create and lock the run's folder."""
        self.made = self._request.make_folder()
        self._held.enter_context(locked(self.made.path))
        return self.made

    def _checkpoints(self, folder: RunFolder, job: Job, samples: str) -> Checkpoints:
        return checkpoints_of(folder, job, identity_of(folder, self._request.loaded, job, samples))

    def _make_late(self, job: Job, samples: str) -> Checkpoints | None:
        """Make the run's folder for its first checkpoint; after a failure the run continues without checkpoints."""
        try:
            made = self._make()
        except UserError as error:
            print_notice(f"no checkpoint is kept: {error}")
            return None
        if self.log is not None:
            self.log.move(made.record_path)
        return self._checkpoints(made, job, samples)
