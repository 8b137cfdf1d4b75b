"""Where a run's time goes: one clock for training, evaluation, checkpoints and what restarts have lost.

It follows MLPerf's habits: it starts after initialisation and profiling, never pauses, and includes evaluation; the
time without evaluation is given too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pipebench.checkpoint.progress import SavedProgress
from pipebench.engine.engine import TrainingEngine


class RunClock:
    """Adds up an engine's time by what it was spent on.

    Attributes:
        training_s: seconds in training, fill and drain included.
        evaluation_s: seconds in evaluations.
        checkpoint_s: seconds in writing checkpoints.
        lost_s: seconds by which the clock ran on between a checkpoint and the process that goes on from it.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        self.training_s = self.evaluation_s = self.checkpoint_s = self.lost_s = 0.0

    @property
    def drained_s(self) -> float:
        """The clock at the last drain."""
        return self._engine.clock_s

    def start(self, saved: SavedProgress | None, lost_s: float) -> None:
        """Let the clock start, or go on from a checkpoint, `lost_s` later."""
        self.lost_s = lost_s
        clock_s = lost_s
        if saved is not None:
            clock_s += saved.clock_s
            self.lost_s += saved.lost_s
            self.training_s, self.evaluation_s = saved.training_s, saved.evaluation_s
            self.checkpoint_s = saved.checkpoint_s
        self._engine.start_clock(clock_s)

    @contextmanager
    def spending(self, on: Literal["training_s", "evaluation_s", "checkpoint_s"]) -> Iterator[None]:
        """Add the time inside to one of the sums; where an error ends training, `end_early` does."""
        before_s = self.drained_s
        yield
        setattr(self, on, getattr(self, on) + self.drained_s - before_s)

    def end_early(self, *, in_training: bool) -> float:
        """Return the run's time where it ended between two drains.

        Args:
            in_training: what it did since the last drain.
        """
        total_s = max(self._engine.now_s, self.drained_s)
        if in_training:
            self.training_s += total_s - self.drained_s
        return total_s
