"""Interfaces of the training loop: the engine's factory, and the sink for progress."""

from collections.abc import Callable
from typing import Protocol

from pipebench.engine.engine import OnLoss, OnUnit, TrainingEngine
from pipebench.train.result import Point

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
