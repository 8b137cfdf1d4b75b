"""Writing checkpoints, by all processes together, and resuming from the newest one that fits the run."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipebench.checkpoint.identity import RunIdentity, changes, check_same_run
from pipebench.checkpoint.optimizers import check_updates
from pipebench.checkpoint.progress import Facts, SavedProgress
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.store import Checkpoint, CheckpointFile, Checkpoints
from pipebench.engine.engine import Gather, TrainingEngine
from pipebench.model.sampling import Sampler
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.users_code import reason
from pipebench.train.fit import check_fits, fitting_carried
from pipebench.train.interfaces import ProgressSink
from pipebench.train.job import Job
from pipebench.train.metrics import EarlierWorkers, sum_facts

# Fields of the pipeline and of the recipe's engine on which rates, bytes and memory depend beside the plan
_OF_SCHEDULE = (
    "order", "flushes", "depth", "microbatches", "accumulate", "weights", "sync", "backward", "sums", "shard",
    "reshards",
)  # fmt: skip
_OF_ENGINE = ("device", "threads", "timing", "deterministic", "tf32", "compile", "channels_last")
_SAMPLES_COMPARED = 8  # enough to tell two orders of samples apart
_LAST_WAIT_S = 5.0  # for a checkpoint under way after a failure: the parts of other processes may never come
_LOG = logging.getLogger(__name__)
ProgressOf = Callable[[list[Facts]], dict[str, Any]]  # the training loop's state, given all processes' counters


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that fits a run."""

    step: int  # minibatches done
    state: ModelState  # of the whole model; emptied by the run that resumes from it
    progress: SavedProgress  # of the training loop


def resume_point(checkpoint: Checkpoint, job: Job, run: RunIdentity | None = None) -> ResumePoint:
    """Return a complete checkpoint's content after checking that all of it fits a job and its run.

    Args:
        checkpoint: the checkpoint.
        job: what will be trained.
        run: the run that resumes; None for one without a folder, which may resume from any run.

    Raises:
        CheckpointError: names the checkpoint and what in it does not fit, found and expected.
    """
    try:
        check_same_run(checkpoint.run, run)
        progress = SavedProgress.from_json(checkpoint.progress)
        _check_progress(progress, job, checkpoint.step)
        loaded = checkpoint.load_parts()
        state = check_fits(ModelState.joined(loaded), job.setup, checkpoint.step)
        for part, found in zip(checkpoint.parts, loaded, strict=True):
            check_updates(part.updates, found.optimizer)  # joined, a replica's piece would hide another's lost state
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    return ResumePoint(checkpoint.step, state, progress)


def load_checked(checkpoint: Checkpoint, optimizer: Collection[str], job: Job) -> ResumePoint:
    """Return the content of a checkpoint that another process has checked: a check takes memory and time.

    `optimizer` names the parameters whose optimizer state the other process restores.

    Raises:
        CheckpointError: it has changed since it was checked.
    """
    state = checkpoint.load()
    state.optimizer = {name: own for name, own in state.optimizer.items() if name in optimizer}
    state.carried = fitting_carried(state.carried, job.setup, checkpoint.step)
    return ResumePoint(checkpoint.step, state, SavedProgress.from_json(checkpoint.progress))


def newest(checkpoints: Checkpoints, job: Job) -> tuple[ResumePoint | None, list[str]]:
    """Return the newest complete checkpoint that fits, and sentences for the user.

    They say why newer checkpoints were skipped, and what has changed since this one was written.
    """
    fitting: list[ResumePoint] = []
    run = checkpoints.run
    found, remarks = checkpoints.latest(fits=lambda each: fitting.append(resume_point(each, job, run)))
    remarks += [] if found is None else changes(found.run, run, found.step)
    return (fitting[0] if fitting else None), remarks


def last_samples(sampler: Sampler, step: int) -> tuple[int, ...]:
    """Return the first samples of the last of `step` minibatches."""
    return tuple(sampler.indices(step - 1)[:_SAMPLES_COMPARED]) if step else ()


def taken_by(job: Job) -> str:
    """Return the engine and the plan, in words: a resumed run has the same workers only if they match."""
    setup = job.setup
    slices = f", slices {setup.costs.slices}" if setup.costs.slices > 1 else ""
    return f"{job.recipe.engine.kind}, {setup.plan.stages}, devices {setup.devices}{slices}"


def counted_under(job: Job) -> str:
    """Return what the counters of equal workers depend on besides, in words: schedule, cluster, precision, settings."""
    recipe, pipeline = job.recipe, job.setup.pipeline
    schedule = ", ".join(f"{name} {getattr(pipeline, name)}" for name in _OF_SCHEDULE)
    settings = ", ".join(f"{name} {getattr(recipe.engine, name)}" for name in _OF_ENGINE)
    return f"{schedule}, {recipe.train.precision}, {recipe.cluster}, {settings}"


def count_on(progress: SavedProgress, job: Job) -> bool:
    """Return whether a resumed run's workers continue a checkpoint's counters; older checkpoints lack settings."""
    return progress.taken_by == taken_by(job) and progress.counted_under in ("", counted_under(job))


def earlier_workers(progress: SavedProgress, *, count_on: bool) -> EarlierWorkers:
    """Return what was done before this run's workers begin to count.

    If they `count_on`, they continue the checkpoint's counters; otherwise they begin at 0.
    """
    sent = Counter({(kind, level): num_bytes for kind, level, num_bytes in progress.bytes_before})
    if count_on:
        return EarlierWorkers(int(progress.counted_from[0]), float(progress.counted_from[1]), sent)
    return EarlierWorkers(progress.samples, progress.training_s, sent + sum_facts(progress.facts)["num_bytes"])


def _check_progress(progress: SavedProgress, job: Job, step: int) -> None:
    """Check a checkpoint's counters against this run."""
    setup, kind = job.setup, engine_kind(job.recipe)
    samples = setup.sampler.samples_before(step)
    if progress.samples != samples:
        raise CheckpointError(
            f"progress.samples: found {progress.samples:,}, expected after {step:,} minibatches are {samples:,}"
        )
    order = last_samples(setup.sampler, step)
    if progress.last_samples != order:
        raise CheckpointError(
            f"progress.last_samples: found {[*progress.last_samples]}, expected of minibatch {step - 1:,} are "
            f"{[*order]}: the order of samples is another"
        )
    for index, point in enumerate(progress.points):
        for metric in ("train_loss", "eval_loss", *setup.dataset.metrics):
            if metric not in point["metrics"]:
                raise CheckpointError(
                    f"progress.points[{index}].metrics: found no {metric}, which every evaluation has"
                )
    alone, workers = not kind.in_processes, setup.pipeline.num_workers
    if any(("meter" in facts) is alone for facts in progress.facts):
        raise CheckpointError(f"progress.facts: found those of another engine, expected are those of a {kind.name} one")
    if progress.taken_by == taken_by(job):
        shape = [len(facts[name]) for facts in progress.facts for name in ("peak_bytes", "weight_versions_max")]
        if shape != ([workers] * 2 if alone else [1] * 2 * workers):
            raise CheckpointError(f"progress.facts: found those of other workers, expected are those of {workers}")


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where a run writes checkpoints, and the one it resumes from."""

    checkpoints: Checkpoints | None = None  # those of `train.checkpoint_every`; None: the recipe asks for none
    resume_from: ResumePoint | None = None  # None: start from the beginning
    lost_s: float = 0.0  # seconds on the clock since that checkpoint or, without one, since the start
    # For runs that ask for no checkpoints: returns where to write one, called when one is due
    late: Callable[[], Checkpoints | None] = lambda: None
    # Whether such a run writes those of its best evaluation and its end, and some in between, not only one when stopped
    keeps: bool = False

    @property
    def samples_done(self) -> int:
        """Samples trained on before this run resumes."""
        return 0 if self.resume_from is None else self.resume_from.progress.samples


NO_CHECKPOINTS = CheckpointPolicy()


class CheckpointWriter:
    """Writes a run's checkpoints in a thread beside training, one at a time.

    Training waits only for a copy of its state.

    All processes make the same calls, at drains. A checkpoint is complete once the first process knows that all parts
    are written, and commits it; until then the one before is the newest.
    """

    def __init__(self, engine: TrainingEngine, progress: ProgressSink) -> None:
        self._engine, self._progress = engine, progress
        self._gather: Gather | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._problem = ""

    def write(self, store: Checkpoints, step: int, training_state: ProgressOf) -> None:
        """Begin to write a checkpoint after `step` minibatches; first wait for the one under way.

        If a part can't be written, `wait` reports it, and the previous checkpoint stays.
        """
        engine = self._engine
        self.wait()
        gather = self._gather = self._gather or engine.gathering()
        copies, problem = list[tuple[str, ModelState]](), None
        try:
            copies = [(name, state.copied()) for name, state in engine.parts()]
        except CheckpointError as error:
            problem = str(error)
        progress = self._progress_of(training_state)
        if engine.setup.device.type == "cuda":
            torch.cuda.synchronize(engine.setup.device)

        def work() -> None:
            parts = _written(store, step, copies) if problem is None else problem
            shares = gather(parts)
            if shares:
                self._problem = _committed(store, step, shares, progress)

        self._begin(work, step)
        engine.sync_clock()

    def amend(self, store: Checkpoints, step: int, training_state: ProgressOf) -> None:
        """Replace the training loop's state in the checkpoint begun last, of `step`, once that is written."""
        progress, before = self._progress_of(training_state), self._thread

        def work() -> None:
            if before is not None:
                before.join()
            if self._failure is None and not self._problem:
                self._problem = _amended(store, step, progress)

        if self._engine.is_first:
            self._begin(work, step)
        self._engine.sync_clock()

    def _progress_of(self, training_state: ProgressOf) -> dict[str, Any]:
        """Return the training loop's state in the first process; in others nothing."""
        facts = self._engine.exchange(self._engine.facts())
        return training_state(facts) if self._engine.is_first else {}

    def _begin(self, work: Callable[[], None], step: int) -> None:
        """Begin some work in a thread, for which `wait` waits."""
        may_begin, is_waited_for = threading.Event(), False

        def run() -> None:
            may_begin.wait()
            if not is_waited_for:  # Ctrl-C has ended `start`
                return
            try:
                work()
            except BaseException as error:  # raised where training waits for it
                self._failure = error

        # A daemon, so that a process that fails ends: it might wait for the part of another one that has ended.
        thread = threading.Thread(target=run, name=f"checkpoint {step}", daemon=True)
        try:
            thread.start()
            self._thread, is_waited_for = thread, True
        finally:
            may_begin.set()

    def wait(self) -> None:
        """Wait for the checkpoint under way; report its failure."""
        if self._thread is None:
            return
        self._engine.set_activity("checkpoint")
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure
        if self._problem:
            self._progress.note(self._problem)
            _LOG.warning(self._problem)
            self._problem = ""

    def end(self) -> None:
        """Wait a few seconds for the checkpoint under way, after a failure."""
        if self._thread is not None:
            self._thread.join(_LAST_WAIT_S)


_Share = list[dict[str, Any]] | str  # a process's parts, or why it has none


def _written(store: Checkpoints, step: int, copies: Sequence[tuple[str, ModelState]]) -> _Share:
    try:
        return [asdict(store.write_part(step, name, state)) for name, state in copies]
    except (OSError, CheckpointError) as error:
        return str(error)
    except Exception as error:  # of any kind: without this process's share the first one would wait for ever
        _LOG.warning("the part of minibatch %d can't be written", step, exc_info=error)
        return reason(error)


def _committed(store: Checkpoints, step: int, shares: Sequence[_Share], progress: Mapping[str, Any]) -> str:
    """Commit a checkpoint of all processes' parts; return "", or a sentence for the user on why it was abandoned."""
    problem = next((share for share in shares if isinstance(share, str)), None)
    if problem is None:
        parts = [CheckpointFile(**part) for share in shares if not isinstance(share, str) for part in share]
        try:
            store.commit(step, parts, progress)
        except OSError as error:
            problem = str(error)
    if problem is None:
        return ""
    store.abandon(step)
    return f"no checkpoint at minibatch {step}: {problem}; {_others(store)}, training goes on"


def _amended(store: Checkpoints, step: int, progress: Mapping[str, Any]) -> str:
    """Replace a checkpoint's progress; return "", or a sentence for the user on why it wasn't."""
    try:
        store.amend(step, progress)
    except (OSError, CheckpointError) as error:
        return f"the checkpoint at minibatch {step} lacks its evaluation: {error}; training goes on"
    return ""


def _others(store: Checkpoints) -> str:
    """Return whether there are other checkpoints, in words; somebody may have removed the run's folder."""
    try:
        return "those before stay" if store.steps() else "there is no other one"
    except OSError:
        return "nor can those before be read"
