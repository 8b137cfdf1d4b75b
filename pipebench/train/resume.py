"""Where a run goes on: the newest checkpoint that is whole and fits the run, checked before anything of it is used."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipebench.checkpoint.fit import check_fits
from pipebench.checkpoint.progress import Progress
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.store import Checkpoint, Checkpoints, reason_of
from pipebench.errors import UserError
from pipebench.recipe.engines import engine_kind
from pipebench.train.metrics import EarlierWorkers, sum_facts
from pipebench.train.prepare import Job


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that fits a run.

    Attributes:
        step: minibatches done.
        state: the whole model's.
        progress: the training loop's.
    """

    step: int
    state: ModelState
    progress: Progress


def resume_point(checkpoint: Checkpoint, job: Job) -> ResumePoint:
    """Return a checkpoint's content, once all of it is known to fit.

    Raises:
        CheckpointError: names the checkpoint and what in it doesn't fit, what was found and what is expected.
    """
    try:
        progress = Progress.from_json(checkpoint.progress)
        _check_progress(progress, job, checkpoint.step)
        state = check_fits(checkpoint.load(), job.setup, checkpoint.step)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    return ResumePoint(checkpoint.step, state, progress)


def load_checked(checkpoint: Checkpoint, optimizer: Collection[str]) -> ResumePoint:
    """Return the content of a checkpoint that another process has just found to fit; checking takes memory and time.

    Args:
        checkpoint: see there.
        optimizer: the parameters whose optimizer state that process takes up.

    Raises:
        CheckpointError: it has changed since.
    """
    state = checkpoint.load()
    state.optimizer = {name: kept for name, kept in state.optimizer.items() if name in optimizer}
    return ResumePoint(checkpoint.step, state, Progress.from_json(checkpoint.progress))


def newest(checkpoints: Checkpoints, job: Job) -> tuple[ResumePoint | None, list[str]]:
    """Return the newest checkpoint that is whole and fits, and a sentence for each newer one that was passed over."""
    fitting: list[ResumePoint] = []
    _, skipped = checkpoints.latest(fits=lambda checkpoint: fitting.append(resume_point(checkpoint, job)))
    return (fitting[0] if fitting else None), skipped


def nothing_to_go_on_from(run_id: str, skipped: Sequence[str]) -> UserError:
    """Return what a user is told whose run has no checkpoint that can be used."""
    return UserError(f"--resume: run {run_id} has no checkpoint to go on from{reason_of(skipped)}")


def taken_by(job: Job) -> str:
    """Return what decides whether what workers counted can be added to: the engine and the plan."""
    setup = job.setup
    return f"{job.recipe.engine.kind}, {setup.plan.stages}, devices {setup.devices}"


def earlier_workers(progress: Progress, *, same_workers: bool) -> EarlierWorkers:
    """Return what was done before what this run's workers count.

    Args:
        progress: where the run goes on.
        same_workers: they go on counting where the checkpoint's workers were; others begin anew.
    """
    sent = Counter({(kind, level): num_bytes for kind, level, num_bytes in progress.bytes_before})
    if same_workers:
        return EarlierWorkers(int(progress.counted_from[0]), float(progress.counted_from[1]), sent)
    return EarlierWorkers(progress.samples, progress.training_s, sent + sum_facts(progress.facts)["num_bytes"])


def _check_progress(progress: Progress, job: Job, step: int) -> None:
    """Check what has to hold between a checkpoint's counters and this run."""
    setup, kind = job.setup, engine_kind(job.recipe)
    samples = setup.sampler.samples_before(step)
    if progress.samples != samples:
        raise CheckpointError(
            f"progress.samples: found {progress.samples:,}, expected after {step:,} minibatches are {samples:,}"
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
