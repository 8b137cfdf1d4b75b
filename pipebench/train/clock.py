"""The run's clock: training, evaluation, checkpoints and time lost by restarts.

As in MLPerf, it starts after initialisation and profiling, never pauses, and includes evaluation; time without
evaluation is also reported.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pipebench.checkpoint.progress import SavedProgress
from pipebench.engine.engine import TrainingEngine


class RunClock:
    """Sums of an engine's time by purpose."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        # Training includes fill and drain; lost is from a checkpoint to the process that resumes from it
        self.training_s = self.evaluation_s = self.checkpoint_s = self.lost_s = 0.0

    @property
    def drained_s(self) -> float:
        """The clock at the last drain."""
        return self._engine.clock_s

    def start(self, saved: SavedProgress | None, lost_s: float) -> None:
        """Start the clock, or resume it from a checkpoint `lost_s` later."""
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
        """Add the time inside to one of the sums; after an error in training `end_early` does."""
        before_s = self.drained_s
        yield
        setattr(self, on, getattr(self, on) + self.drained_s - before_s)

    def end_early(self, *, in_training: bool) -> float:
        """Return the run's time if it ends between two drains; `in_training`: since the last drain."""
        total_s = max(self._engine.now_s, self.drained_s)
        if in_training:
            self.training_s += total_s - self.drained_s
        return total_s
