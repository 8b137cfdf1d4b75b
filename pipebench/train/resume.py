"""Where a run goes on: the newest checkpoint that is whole and fits the run, checked before anything of it is used."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipebench.checkpoint.fit import check_fits
from pipebench.checkpoint.progress import Progress
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.store import Checkpoint, Checkpoints, reason_of
from pipebench.errors import UserError
from pipebench.train.answer import together
from pipebench.train.prepare import DISTRIBUTED, Prepared


@dataclass(frozen=True)
class TakenUp:
    """A checkpoint that fits a run.

    Attributes:
        step: minibatches done.
        state: the whole model's.
        progress: the training loop's.
    """

    step: int
    state: ModelState
    progress: Progress


def taken_up(checkpoint: Checkpoint, prepared: Prepared) -> TakenUp:
    """Return a checkpoint's content, once all of it is known to fit.

    Raises:
        CheckpointError: names the checkpoint and what in it doesn't fit, what was found and what is expected.
    """
    try:
        progress = Progress.from_json(checkpoint.progress)
        _check_progress(progress, prepared, checkpoint.step)
        state = check_fits(checkpoint.load(), prepared.setup, checkpoint.step)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    return TakenUp(checkpoint.step, state, progress)


def as_checked(checkpoint: Checkpoint, optimizer: Collection[str]) -> TakenUp:
    """Return the content of a checkpoint that another process has just found to fit; checking takes memory and time.

    Args:
        checkpoint: see there.
        optimizer: the parameters whose optimizer state that process takes up.

    Raises:
        CheckpointError: it has changed since.
    """
    state = checkpoint.load()
    state.optimizer = {name: kept for name, kept in state.optimizer.items() if name in optimizer}
    return TakenUp(checkpoint.step, state, Progress.from_json(checkpoint.progress))


def newest(checkpoints: Checkpoints, prepared: Prepared) -> tuple[TakenUp | None, list[str]]:
    """Return the newest checkpoint that is whole and fits, and a sentence for each newer one that was passed over."""
    fitting: list[TakenUp] = []
    _, skipped = checkpoints.latest(fits=lambda checkpoint: fitting.append(taken_up(checkpoint, prepared)))
    return (fitting[0] if fitting else None), skipped


def nothing_to_go_on_from(run_id: str, skipped: Sequence[str]) -> UserError:
    """Return what a user is told whose run has no checkpoint that can be used."""
    return UserError(f"--resume: run {run_id} has no checkpoint to go on from{reason_of(skipped)}")


def taken_by(prepared: Prepared) -> str:
    """Return what decides whether what workers counted can be added to: the engine and the plan."""
    setup = prepared.setup
    return f"{prepared.recipe.engine.kind}, {setup.plan.stages}, devices {setup.devices}"


def bytes_before(progress: Progress, *, with_facts: bool) -> Counter[tuple[str, str]]:
    """Return bytes by (kind, level) that were sent before what this run's workers count.

    Args:
        progress: where the run goes on.
        with_facts: what the checkpoint's workers counted is among it, since these workers can't add to it.
    """
    sent = Counter({(kind, level): num_bytes for kind, level, num_bytes in progress.bytes_before})
    if with_facts:
        sent.update(together(progress.facts)["num_bytes"])
    return sent


def _check_progress(progress: Progress, prepared: Prepared, step: int) -> None:
    """Check what has to hold between a checkpoint's counters and this run."""
    setup, kind = prepared.setup, prepared.recipe.engine.kind
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
    alone, workers = kind != DISTRIBUTED, setup.pipeline.num_workers
    if any(("meter" in facts) is alone for facts in progress.facts):
        raise CheckpointError(f"progress.facts: found those of another engine, expected are those of a {kind} one")
    if progress.taken_by == taken_by(prepared):
        shape = [len(facts[name]) for facts in progress.facts for name in ("peak_bytes", "weight_versions_max")]
        if shape != ([workers] * 2 if alone else [1] * 2 * workers):
            raise CheckpointError(f"progress.facts: found those of other workers, expected are those of {workers}")
