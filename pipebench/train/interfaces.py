"""What the training loop is given: what makes the engine that trains, and somebody to tell how it gets on."""

from collections.abc import Callable
from typing import Protocol

from pipebench.engine.engine import OnLoss, OnUnit, TrainingEngine
from pipebench.train.result import Point

MakeEngine = Callable[[OnLoss, OnUnit], TrainingEngine]
OnPoint = Callable[[Point], None]


class ProgressSink(Protocol):
    """What a run tells while it goes on."""

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        """Tell of one minibatch; called often."""

    def evaluation(self, point: Point, epoch: float) -> None:
        """Tell of one evaluation."""

    def note(self, text: str) -> None:
        """Tell of anything else, in a line that stays."""
