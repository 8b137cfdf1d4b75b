"""The run's clock: seconds in training, in evaluations, in checkpoints, and lost by restarts.

As in MLPerf, it starts after initialisation and profiling, never pauses, and includes evaluation. Time without
evaluation is reported, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pipebench.checkpoint.progress import SavedProgress
from pipebench.engine.engine import TrainingEngine


class RunClock:
    """Sums an engine's seconds by purpose."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        self.training_s = 0.0  # fill and drain included
        self.evaluation_s = self.checkpoint_s = 0.0
        self.lost_s = 0.0  # from checkpoints to the starts of the processes that resumed from them

    @property
    def drained_s(self) -> float:
        """The clock at the last drain."""
        return self._engine.clock_s

    def start(self, saved: SavedProgress | None, lost_s: float) -> None:
        """Start the clock, or resume it from a checkpoint that was written `lost_s` seconds ago."""
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
        """Add the seconds inside to one of the sums. After an error in training, `end_early` adds them."""
        before_s = self.drained_s
        yield
        setattr(self, on, getattr(self, on) + self.drained_s - before_s)

    def end_early(self, *, in_training: bool) -> float:
        """Return the run's seconds if it ends between two drains; `in_training`: it trained since the last drain."""
        total_s = max(self._engine.now_s, self.drained_s)
        if in_training:
            self.training_s += total_s - self.drained_s
        return total_s
