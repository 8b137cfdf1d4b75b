"""Throughput over time: what a pipeline finishes and sends per second, before, while and after something changes."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipebench.model.sampling import Size, UnitShape
from pipebench.schedule.instructions import ENDS
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import Transfer


class Finished(NamedTuple):
    """A unit that is through: its backward on the input stage has ended.

    Attributes:
        end_s: when, on the run's clock.
        samples: of the unit.
    """

    end_s: float
    samples: int


class Finishes:
    """Listens to a meter, and notes when units are through.

    Args:
        pipeline: the shape of what is run.

    Attributes:
        units: those that are through, in the order of time.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.units: list[Finished] = []
        self._pipeline = pipeline
        self._size_of: Callable[[int], Size] = lambda unit: 0

    def begin(self, size_of: Callable[[int], Size]) -> None:
        """Start a segment."""
        self._size_of = size_of

    def event(self, event: TimelineEvent) -> None:
        """Take note of one event."""
        op, stage, number, *_ = event.instruction
        if stage == 0 and op in ENDS:
            size = self._size_of(number)
            self.units.append(Finished(event.end_s, size.num_samples if isinstance(size, UnitShape) else size))

    def transfer(self, transfer: Transfer) -> None:
        """Transfers finish nothing."""


class Mark(NamedTuple):
    """What there was up to a moment.

    Attributes:
        clock_s: the moment.
        samples: that were through.
        num_bytes: that had arrived, by kind and level.
    """

    clock_s: float
    samples: int
    num_bytes: Counter[tuple[str, str]]


class Marks:
    """Listens to a meter, and makes a mark whenever so many more units are through.

    Args:
        pipeline: the shape of what is run.
        every: units from mark to mark.

    Attributes:
        made: since the segment began, and counted from there.
    """

    def __init__(self, pipeline: Pipeline, every: int) -> None:
        self.made: list[Mark] = []
        self._every, self._finishes = every, Finishes(pipeline)
        self._num_bytes: Counter[tuple[str, str]] = Counter()

    def begin(self, size_of: Callable[[int], Size]) -> None:
        """Start a segment."""
        self.made = []
        self._finishes.units.clear()
        self._finishes.begin(size_of)
        self._num_bytes.clear()

    def event(self, event: TimelineEvent) -> None:
        """Take note of one event."""
        units = self._finishes.units
        before = len(units)
        self._finishes.event(event)
        if len(units) > before and len(units) % self._every == 0:
            samples = sum(unit.samples for unit in units)
            self.made.append(Mark(units[-1].end_s, samples, Counter(self._num_bytes)))

    def transfer(self, transfer: Transfer) -> None:
        """Count what has arrived."""
        self._num_bytes[transfer.kind, transfer.level] += transfer.num_bytes


def throughput(units: Sequence[Finished], period_s: float, end_s: float) -> list[float]:
    """Return the samples per second that were finished in each of the periods that end before a time.

    Args:
        units: that are through, in any order.
        period_s: seconds, more than 0.
        end_s: of the last period at most.
    """
    counts = [0] * int(end_s / period_s + 1e-9)
    for unit in units:
        index = int(unit.end_s / period_s)
        if index < len(counts):
            counts[index] += unit.samples
    return [count / period_s for count in counts]
