"""Interfaces of the training loop: the engine's factory, the sink for progress, and extensions."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pipebench.checkpoint.progress import SavedProgress
from pipebench.engine.engine import OnLoss, OnUnit, TrainingEngine
from pipebench.model.plan import Plan
from pipebench.train.clock import RunClock
from pipebench.train.job import Job
from pipebench.train.result import Point, RunResult

MakeEngine = Callable[[OnLoss, OnUnit], TrainingEngine]
OnPoint = Callable[[Point], None]


class ProgressSink(Protocol):
    """Receives a run's progress."""

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        """Report one unit: a minibatch, or a microbatch where minibatches are cut.

        Args:
            samples: trained so far, in the whole run.
            clock_s: the run's clock.
            loss: mean over the latest unit whose loss is known, on a GPU up to 50 units old; NaN if none is.
            occupancy: share of the workers' time that they compute, 0 to 1.
        """

    def evaluation(self, point: Point, epoch: float) -> None:
        """Report one evaluation."""

    def note(self, text: str) -> None:
        """Report anything else, in a line that stays on the screen."""


class LoopExtension:
    """An extension's part in the training loop of every process."""

    def __init__(self, job: Job, engine: TrainingEngine, clock: RunClock, note: Callable[[str], None]) -> None:
        """Make it with the loop's job, engine and clock; `note` reports a sentence to the user."""

    def restore(self, saved: SavedProgress) -> None:
        """Resume from a checkpoint, before the engine restores its state."""

    def restored_plan(self, saved: SavedProgress) -> Plan | None:
        """Return the plan under which the same workers wrote a checkpoint; None: the engine's present one."""
        return None

    def begins(self, done: int, drain: int) -> int:
        """Prepare the segment from minibatch `done` of the run to `drain`; return where it ends, at most `drain`."""
        return drain

    def ended(self, first: int, done: int) -> None:
        """Called after the segment of minibatches [first, done) of the run."""

    def drained(self, done: int) -> None:
        """Called at the drain after `done` minibatches; may change the setup of the rest of the run."""

    def evaluated(self, point: Point, done: int, *, ends: bool) -> None:
        """Called after an evaluation, at the drain after `done` minibatches; `ends`: the run ends with it."""

    def saved(self) -> dict[str, Any]:
        """Return fields for both checkpoints and results."""
        return {}

    def metrics(self, num_bytes: Mapping[tuple[str, str], int]) -> dict[str, float]:
        """Return metrics of the run, given the bytes sent by kind and level."""
        return {}

    def completed(self, result: RunResult) -> RunResult:
        """Return the run's result with what the extension adds to it."""
        return result
