"""Throughput over time: samples finished and bytes sent per second, before, during and after a change of cuts."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipebench.model.sampling import Size, UnitShape
from pipebench.schedule.instructions import ENDS
from pipebench.simulate.meter import COMPUTED, Listener
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import Transfer


class Finished(NamedTuple):
    """A unit whose backward on the input stage has ended."""

    end_s: float
    samples: int


class Finishes(Listener):
    """A listener that records when units are finished."""

    def __init__(self) -> None:
        self.units: list[Finished] = []  # in order of time
        self._size_of: Callable[[int], Size] = lambda unit: 0

    def begin(self, size_of: Callable[[int], Size]) -> None:
        """Start a segment."""
        self._size_of = size_of

    def event(self, event: TimelineEvent) -> None:
        """Record an event."""
        op, stage, number, *_ = event.instruction
        if stage == 0 and op in ENDS:
            size = self._size_of(number)
            self.units.append(Finished(event.end_s, size.num_samples if isinstance(size, UnitShape) else size))


class Mark(NamedTuple):
    """Totals from the start of a segment to a moment."""

    clock_s: float  # the moment, on the run's clock
    samples: int  # finished
    num_bytes: Counter[tuple[str, str]]  # sent and arrived, by kind and level
    busy_s: float = 0.0  # of forwards, backwards and updates, summed over workers


class Marks(Finishes):
    """A listener that makes a mark after every `every` finished units of a segment."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.made: list[Mark] = []  # of the current segment
        self._every = every
        self._num_bytes: Counter[tuple[str, str]] = Counter()
        self._busy_s = 0.0

    def begin(self, size_of: Callable[[int], Size]) -> None:
        """Start a segment."""
        super().begin(size_of)
        self.units, self.made = [], []
        self._num_bytes.clear()
        self._busy_s = 0.0

    def event(self, event: TimelineEvent) -> None:
        """Record an event."""
        if event.instruction.op in COMPUTED:
            self._busy_s += event.end_s - event.start_s
        before = len(self.units)
        super().event(event)
        if len(self.units) > before and len(self.units) % self._every == 0:
            samples = sum(unit.samples for unit in self.units)
            self.made.append(Mark(self.units[-1].end_s, samples, Counter(self._num_bytes), self._busy_s))

    def transfer(self, transfer: Transfer) -> None:
        """Count the bytes that have arrived."""
        self._num_bytes[transfer.kind, transfer.level] += transfer.num_bytes


def throughput(units: Sequence[Finished], period_s: float, end_s: float) -> list[float]:
    """Return the samples finished per second in each of the whole periods of `period_s` before `end_s`."""
    counts = [0] * int(end_s / period_s + 1e-9)
    for unit in units:
        index = int(unit.end_s / period_s)
        if index < len(counts):
            counts[index] += unit.samples
    return [count / period_s for count in counts]
