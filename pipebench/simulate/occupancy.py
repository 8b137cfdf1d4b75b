"""What workers spend their time on, over time: computing, communicating, or idle."""

from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipebench.schedule.operations import COMPUTE, SEND, with_role
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.meter import Listener
from pipebench.simulate.simulation import TimelineEvent

COMPUTING, COMMUNICATING, IDLE = "computing", "waiting for bytes on their way", "waiting for others (bubble)"
STATES: Final = (COMPUTING, COMMUNICATING, IDLE)
RECORDED_EVENTS = 200_000
_COMPUTE: Final = frozenset(with_role(COMPUTE))
_SENDS: Final = frozenset(with_role(SEND))
_Times = tuple["array[float]", "array[float]"]  # starts and ends


@dataclass(frozen=True)
class Occupancy:
    """Fractions of every worker's time per state, in equal parts of the recorded time."""

    worker_names: tuple[str, ...]
    shares: NDArray[np.float64]  # [worker, state, part] with states as in `STATES`; the sum over states is 1
    end_s: float  # of the last part; the first begins at 0


class OccupancyMeter(Listener):
    """Records when workers compute and when they communicate."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._names = pipeline.worker_names
        self._busy: list[list[_Times]] = [[(array("d"), array("d")) for _ in STATES[:2]] for _ in self._names]
        self._num_events = 0
        self._end_s = 0.0

    def event(self, event: TimelineEvent) -> None:
        """Record an event; the effect of transfers on workers is in events."""
        start_s, end_s, worker, (op, *_), stall_s = event
        if end_s <= start_s or self._num_events >= RECORDED_EVENTS:
            return
        self._num_events += 1
        self._end_s = max(self._end_s, end_s)
        if op in _COMPUTE:
            self._note(worker, 0, start_s, end_s)
        elif op in _SENDS:
            self._note(worker, 1, start_s, end_s)
        elif stall_s > 0:  # the end of the wait, in which the message was in transit
            self._note(worker, 1, end_s - stall_s, end_s)

    def _note(self, worker: int, state: int, start_s: float, end_s: float) -> None:
        starts, ends = self._busy[worker][state]
        starts.append(start_s)
        ends.append(end_s)

    def occupancy(self, num_parts: int) -> Occupancy:
        """Return the shares in equal parts of the recorded time."""
        edges_s = np.linspace(0.0, self._end_s or 1.0, num_parts + 1)
        shares = np.zeros((len(self._names), len(STATES), num_parts))
        for worker, states in enumerate(self._busy):
            for state, (starts, ends) in enumerate(states):
                spent_s = _until(np.array(starts), edges_s) - _until(np.array(ends), edges_s)
                shares[worker, state] = (np.diff(spent_s) / np.diff(edges_s)).clip(0.0, 1.0)
        shares[:, -1] = (1.0 - shares[:, :-1].sum(axis=1)).clip(0.0, 1.0)  # clipped because of rounding
        return Occupancy(self._names, shares, float(edges_s[-1]))


def _until(moments_s: NDArray[np.float64], edges_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of edge - moment over the moments before every edge, in seconds."""
    moments_s = np.sort(moments_s)
    count = np.searchsorted(moments_s, edges_s)
    passed = np.concatenate([[0.0], np.cumsum(moments_s)])
    return np.asarray(count * edges_s - passed[count])
