"""Where a run's time goes: one clock for training, evaluation, checkpoints and what restarts have lost.

It follows MLPerf's habits: it starts after initialisation and profiling, never pauses, and includes evaluation; the
time without evaluation is given too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from pipebench.checkpoint.progress import Progress as SavedProgress


class TimeSource(Protocol):
    """What tells the time, virtual or of the wall: an engine."""

    clock_s: float  # at the last drain

    @property
    def now_s(self) -> float:
        """The time, also between two drains."""

    def start_clock(self, clock_s: float = 0.0) -> None:
        """Let the run's clock start, or go on from `clock_s`."""


class RunClock:
    """Adds up an engine's time by what it was spent on.

    Attributes:
        training_s: seconds in training, fill and drain included.
        evaluation_s: seconds in evaluations.
        checkpoint_s: seconds in writing checkpoints.
        lost_s: seconds by which the clock ran on between a checkpoint and the process that goes on from it.
    """

    def __init__(self, source: TimeSource) -> None:
        self._source = source
        self.training_s = self.evaluation_s = self.checkpoint_s = self.lost_s = 0.0

    @property
    def drained_s(self) -> float:
        """The clock at the last drain."""
        return self._source.clock_s

    def start(self, saved: SavedProgress | None, lost_s: float) -> None:
        """Let the clock start, or go on from a checkpoint, `lost_s` later."""
        self.lost_s = lost_s
        clock_s = lost_s
        if saved is not None:
            clock_s += saved.clock_s
            self.lost_s += saved.lost_s
            self.training_s, self.evaluation_s = saved.training_s, saved.evaluation_s
            self.checkpoint_s = saved.checkpoint_s
        self._source.start_clock(clock_s)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the time inside as training; where an error ends it, `end_early` does."""
        before_s = self.drained_s
        yield
        self.training_s += self.drained_s - before_s

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Count the time inside as evaluation."""
        before_s = self.drained_s
        yield
        self.evaluation_s += self.drained_s - before_s

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Count the time inside as writing a checkpoint."""
        before_s = self.drained_s
        yield
        self.checkpoint_s += self.drained_s - before_s

    def end_early(self, *, in_training: bool) -> float:
        """Return the run's time where it ended between two drains.

        Args:
            in_training: what it did since the last drain.
        """
        total_s = max(self._source.now_s, self.drained_s)
        if in_training:
            self.training_s += total_s - self.drained_s
        return total_s
