"""Interfaces of the training loop: the engine's factory, and the sink for progress."""

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
        """Report one minibatch; called often."""

    def evaluation(self, point: Point, epoch: float) -> None:
        """Report one evaluation."""

    def note(self, text: str) -> None:
        """Report anything else, in a line that stays."""


class LoopExtension:
    """An extension's part in the training loop of every process."""

    def __init__(self, job: Job, engine: TrainingEngine, clock: RunClock, note: Callable[[str], None]) -> None:
        """`note` takes a sentence for the user."""

    def restore(self, saved: SavedProgress) -> None:
        """Resume from a checkpoint, before the engine restores its state."""

    def restored_plan(self, saved: SavedProgress) -> Plan | None:
        """Return the plan that a checkpoint of the same workers was written under; None: the engine's."""
        return None

    def begins(self, done: int, drain: int) -> int:
        """Prepare a segment after `done` minibatches of the run; return those before its end, `drain` or fewer."""
        return drain

    def ended(self, first: int, done: int) -> None:
        """Take note of a segment of minibatches [first, done), trained a moment ago."""

    def drained(self, done: int) -> None:
        """Change the setup of the rest of the run, at the drain after `done` minibatches."""

    def evaluated(self, point: Point, done: int, *, ends: bool) -> None:
        """Take an evaluation at the drain after `done` minibatches; `ends`: the run ends with it."""

    def saved(self) -> dict[str, Any]:
        """Return fields that both checkpoints and results keep."""
        return {}

    def metrics(self, num_bytes: Mapping[tuple[str, str], int]) -> dict[str, float]:
        """Return metrics of a run that has sent so many bytes, by kind and level."""
        return {}

    def completed(self, result: RunResult) -> RunResult:
        """Return the result with what the extension adds."""
        return result
