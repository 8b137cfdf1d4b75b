"""Interfaces of the training loop: the engine's factory, and the sink for progress."""

from collections.abc import Callable, Sequence
from typing import Protocol

from pipebench.checkpoint.progress import CurvePoint
from pipebench.engine.engine import OnLoss, OnUnit, TrainingEngine
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

    def restore(self, points: Sequence[CurvePoint]) -> None:
        """Go on after the evaluations that a checkpoint has, before the engine takes its state."""

    def evaluated(self, point: Point, done: int, *, ends: bool) -> None:
        """Take an evaluation at the drain after `done` minibatches; `ends`: the run ends with it."""

    def completed(self, result: RunResult) -> RunResult:
        """Return the result with what the extension adds."""
        return result
