"""When a run writes checkpoints, where it begins, and how all its processes write one together."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pipebench.checkpoint.progress import Facts
from pipebench.checkpoint.state import CheckpointError
from pipebench.checkpoint.store import Checkpoints, Part
from pipebench.train.interfaces import Engine, Progress
from pipebench.train.resume import ResumePoint

_LOG = logging.getLogger(__name__)

ProgressOf = Callable[[list[Facts]], dict[str, Any]]


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where a run's checkpoints go, and the one it begins with.

    Attributes:
        checkpoints: the run's; None keeps none, but for one where the run is stopped.
        resume_from: where to go on; None begins anew.
        lost_s: seconds by which the clock has run on since that checkpoint (or since the start, without one).
        when_stopped: where the checkpoint of a run goes that is stopped and keeps no others; asked for then.
    """

    checkpoints: Checkpoints | None = None
    resume_from: ResumePoint | None = None
    lost_s: float = 0.0
    when_stopped: Callable[[], Checkpoints | None] = lambda: None


NO_CHECKPOINTS = CheckpointPolicy()


def write_checkpoint(
    store: Checkpoints, step: int, engine: Engine, progress: Progress, training_state: ProgressOf
) -> None:
    """Write a checkpoint; all processes call it. Where that fails, say so: the one before stays.

    Args:
        store: where to.
        step: minibatches done.
        engine: drained.
        progress: told of a failure.
        training_state: returns what is to be kept of the training loop, from what every process has counted.
    """
    parts, problem = [], None
    engine.turn_to("checkpoint")
    try:
        parts = [asdict(store.write_part(step, name, state)) for name, state in engine.parts()]
    except (OSError, CheckpointError) as error:
        problem = str(error)
    shares = engine.exchange({"parts": parts, "problem": problem, "facts": engine.facts()})
    problem = next((share["problem"] for share in shares if share["problem"]), None)
    if engine.is_first:
        engine.turn_to("checkpoint")
        if problem is None:
            try:
                all_parts = [Part(**part) for share in shares for part in share["parts"]]
                store.commit(step, all_parts, training_state([share["facts"] for share in shares]))
            except OSError as error:
                problem = str(error)
        if problem is not None:
            store.abandon(step)
            text = f"no checkpoint at minibatch {step}: {problem}; the one before stays, training goes on"
            progress.note(text)
            _LOG.warning(text)
    engine.settle()
