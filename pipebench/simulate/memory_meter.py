"""Memory over time: turns an engine's events into bytes per worker and kind, and their peaks.

Events describe changes to come (at an instruction's end), transfers changes on two workers; so changes are collected
and sorted from time to time. Sorted ones count for the peaks and are dropped; only the first part is kept as curves,
long enough for fill, a few periods and drain.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from pipebench.model.sampling import Size
from pipebench.schedule.instructions import BACKWARDS, COPIES, Instruction
from pipebench.schedule.operations import ACTIVATION, GRADIENT, MIGRATION, SEND, Op, with_kind
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.costs import Costs
from pipebench.simulate.kinds import KINDS, ON_HOST, RECEIVED, SENT, WEIGHTS
from pipebench.simulate.memory import StageMemoryCosts
from pipebench.simulate.replica_memory import Change, ReplicaMemory
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import Transfer

RECORDED_CHANGES = 200_000  # recorded as curves: some 20,000 units
_NUMBER_OF: Final = {kind: number for number, kind in enumerate((*KINDS, ON_HOST))}
_OF_A_UNIT: Final = (Op.FORWARD, *BACKWARDS, *COPIES)
_SENDS: Final = with_kind(SEND, ACTIVATION, GRADIENT, MIGRATION)


class ReplicaBytes(Protocol):
    """The memory of a stage on a worker: a replica's `ReplicaMemory`, or several while layers move."""

    def before(self) -> Iterable[Change]:
        """Yield what is held before anything runs."""

    def drained(self) -> Iterable[Change]:
        """Begin a segment."""

    def changes(self, it: Instruction, size: Size) -> Iterable[Change]:
        """Yield an instruction's changes, in order."""


# When, at which worker, of which kind, how many bytes more, and what has made them so.
WorkerChange = tuple[float, int, str, int, Instruction | Transfer | None]


class MemoryExtension:
    """What an extension adds to what workers hold; it is made of a pipeline and what replicas of its stages keep."""

    def replica(self, worker: int, stage: int) -> ReplicaBytes | None:
        """Return what tracks a worker's stage in place of a `ReplicaMemory`; None: that does."""
        return None

    def event(self, event: TimelineEvent) -> Iterable[WorkerChange]:
        """Yield what an event changes beside what its replica says, or of another's."""
        return ()

    def transfer(self, transfer: Transfer) -> Iterable[WorkerChange]:
        """Yield what a transfer changes that is neither of values between stages nor a sum."""
        return ()


@dataclass(frozen=True)
class MemoryPeak:
    """What a worker holds at one time."""

    worker: int
    time_s: float
    during: str  # the instruction, or what was arriving
    by_kind: Mapping[str, int]  # bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.by_kind.values())

    @property
    def when(self) -> str:
        """What happens then, as a phrase."""
        return self.during if " " in self.during else f"in {self.during}"


@dataclass(frozen=True)
class Curve:
    """A worker's memory over time: `num_bytes[:, i]` from `times_s[i]` to the next."""

    times_s: NDArray[np.float64]  # ascending
    num_bytes: NDArray[np.int64]  # [kind, time], kinds as in `memory.KINDS`
    host_bytes: NDArray[np.int64]  # [time] on the host

    def followed_by(self, later: "Curve", after_s: float) -> "Curve":
        """Return this and a later curve, whose times begin at `after_s`."""
        return Curve(
            np.concatenate([self.times_s, later.times_s + after_s]),
            np.concatenate([self.num_bytes, later.num_bytes], axis=1),
            np.concatenate([self.host_bytes, later.host_bytes]),
        )


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory of all workers over time; tuples have one entry per worker."""

    worker_names: tuple[str, ...]
    curves: tuple[Curve, ...]  # of the recorded part
    peaks: tuple[MemoryPeak, ...]  # of the whole run: the first time of most bytes
    host_peaks: tuple[int, ...]  # most bytes on the host
    limit_bytes: int | None  # memory of a device, None for no limit
    overflow: MemoryPeak | None  # the first excess over the limit on any worker, if there is one
    end_s: float  # of the recorded part

    @property
    def fullest(self) -> MemoryPeak:
        """The highest peak of all workers; of equals, the first."""
        return max(self.peaks, key=lambda peak: peak.num_bytes)

    def followed_by(self, later: "MemoryTimeline") -> "MemoryTimeline":
        """Return this and, right after it, that of a later segment."""

        def then(peak: MemoryPeak) -> MemoryPeak:
            return replace(peak, time_s=peak.time_s + self.end_s)

        pairs = zip(self.peaks, map(then, later.peaks), strict=True)
        return replace(
            self,
            curves=tuple(
                one.followed_by(other, self.end_s) for one, other in zip(self.curves, later.curves, strict=True)
            ),
            peaks=tuple(max(pair, key=lambda peak: peak.num_bytes) for pair in pairs),
            host_peaks=tuple(map(max, self.host_peaks, later.host_peaks)),
            overflow=self.overflow or (then(later.overflow) if later.overflow else None),
            end_s=self.end_s + later.end_s,
        )


class MemoryMeter:
    """Adds up what workers allocate and free.

    `memories` are of a replica, per stage, and `holdings` per worker, its stages'; without them replicas have
    `memories`. `costs` has sizes of messages; `limit_bytes` is of a device, None for no limit; `start_s` is the run's
    clock at the start.
    """

    # Kinds of transfers whose bytes are at their sender until they have arrived
    between_stages: Sequence[str] = (ACTIVATION, GRADIENT)

    def __init__(
        self,
        pipeline: Pipeline,
        memories: Sequence[StageMemoryCosts],
        costs: Costs,
        limit_bytes: int | None = None,
        *,
        holdings: Sequence[Mapping[int, ReplicaBytes]] | None = None,
        start_s: float = 0.0,
    ) -> None:
        self._pipeline, self._costs, self._limit_bytes = pipeline, costs, limit_bytes
        workers = range(pipeline.num_workers)
        extensions = pipeline.hooks("memory").values()
        self._extensions: list[MemoryExtension] = [make(pipeline, memories) for make in extensions]
        self._holdings: Sequence[Mapping[int, ReplicaBytes]] = holdings or [
            {stage: self._replica(worker, stage, memories[stage]) for stage in pipeline.stages_of(worker)}
            for worker in workers
        ]
        self._size_of: Callable[[int], Size] = lambda unit: 0
        self._times_s, self._changes = array("d"), array("q")
        self._workers, self._kinds = array("i"), array("b")
        self._during: list[Instruction | Transfer | None] = []
        self._levels = np.zeros((pipeline.num_workers, len(_NUMBER_OF)), dtype=np.int64)
        self._last_s, self._end_s = [start_s] * pipeline.num_workers, start_s
        # Messages in transit, by sender, receiver and kind: when they were sent.
        self._on_their_way: dict[tuple[int, int, str], deque[float]] = {}
        # Units that are or will be on a host: since when, because copies are reported at their end.
        self._swapped: dict[tuple[int, int, int], float] = {}
        self._fold_at, self._curves = RECORDED_CHANGES, list[Curve]()
        self._peaks: list[MemoryPeak | None] = [None] * pipeline.num_workers
        self._host_peaks = [0] * pipeline.num_workers
        self._overflow: MemoryPeak | None = None
        for worker, own in enumerate(self._holdings):
            self._add(start_s, worker, WEIGHTS, 0, None)  # the only entry of a worker whose layers are all idle
            for holding in own.values():
                self._note(worker, holding.before(), start_s, start_s, None)

    def have_state(self) -> None:
        """Have the optimizer's state from the start, as in all segments but a run's first."""
        for worker, own in enumerate(self._holdings):
            for holding in own.values():
                if isinstance(holding, ReplicaMemory):
                    self._note(worker, holding.make_state(), self._end_s, self._end_s, None)

    def begin(self, size_of: Callable[[int], Size]) -> None:
        """Start a segment, with nothing in flight; `size_of` gives a unit's size."""
        self._size_of = size_of
        for worker, holdings in enumerate(self._holdings):
            for holding in holdings.values():
                self._note(worker, holding.drained(), self._end_s, self._end_s, None)

    def event(self, event: TimelineEvent) -> None:
        """Record an event."""
        start_s, end_s, worker, it, _ = event
        op, stage, number, peer, *_ = it
        if op is Op.WAIT_NORM:
            return
        self._end_s = max(self._end_s, end_s)
        size = self._size_of(number) if op in _OF_A_UNIT else 0
        self._note(worker, self._holdings[worker][stage].changes(it, size), start_s, end_s, it)
        if op in _SENDS:
            num_bytes = self._sent_bytes(it)
            self._add(start_s, worker, SENT, num_bytes, it)
            if num_bytes:
                connection = worker, self._pipeline.worker(peer, number), _SENDS[op]
                self._on_their_way.setdefault(connection, deque()).append(start_s)
        for extension in self._extensions:
            for change in extension.event(event):
                self._add(*change)
        if op is Op.SWAP_IN:
            self._swapped.pop((worker, stage, number), None)
        if op in COPIES:  # began before the worker's later instructions
            return
        if op is Op.FORWARD and stage in self._pipeline.swaps:
            self._swapped[worker, stage, number] = start_s
        self._last_s[worker] = start_s
        if len(self._times_s) >= self._fold_at:
            waiting_s = (since_s[0] for since_s in self._on_their_way.values() if since_s)
            self._fold(min((*self._last_s, *waiting_s, *self._swapped.values())))
            self._fold_at = max(RECORDED_CHANGES, 2 * len(self._times_s))

    def transfer(self, transfer: Transfer) -> None:
        """Record a message or a server's transfer; sums happen where the gradients are."""
        if len(transfer.senders) > 1:
            return
        (sender,), (receiver,) = transfer.senders, transfer.receivers
        if transfer.kind in self.between_stages:
            if transfer.num_bytes:
                waiting = self._on_their_way[sender, receiver, transfer.kind]
                # Blocks and units are reported out of order; keeping the oldest is safe.
                _ = waiting.pop() if transfer.kind == MIGRATION else waiting.popleft()
            self._add(transfer.end_s, sender, SENT, -transfer.num_bytes, transfer)
            self._add(transfer.start_s, receiver, RECEIVED, transfer.num_bytes, transfer)
        else:
            for change in (each for extension in self._extensions for each in extension.transfer(transfer)):
                self._add(*change)

    def timeline(self) -> MemoryTimeline:
        """Return the memory over time so far."""
        self._fold(math.inf)
        names = self._pipeline.worker_names
        peaks = tuple(peak for peak in self._peaks if peak is not None)
        end_s = self._end_s if not self._curves else max(curve.times_s[-1] for curve in self._curves)
        return MemoryTimeline(
            names, tuple(self._curves), peaks, tuple(self._host_peaks), self._limit_bytes, self._overflow, float(end_s)
        )

    def _replica(self, worker: int, stage: int, memory: StageMemoryCosts) -> ReplicaBytes:
        found = (extension.replica(worker, stage) for extension in self._extensions)
        return next((each for each in found if each is not None), None) or ReplicaMemory(memory)

    def _sent_bytes(self, it: Instruction) -> int:
        if it.op is Op.SEND_ACTIVATION:
            return self._costs.activation_bytes[it.stage, it.peer][self._size_of(it.number)]
        if it.op is Op.SEND_GRADIENT:
            return self._costs.gradient_bytes[it.peer, it.stage][self._size_of(it.number)]
        return 0

    def _note(
        self, worker: int, changes: Iterable[Change], start_s: float, end_s: float, during: Instruction | None
    ) -> None:
        for kind, num_bytes, at_end in changes:
            if num_bytes:
                self._add(end_s if at_end else start_s, worker, kind, num_bytes, during)

    def _add(
        self, time_s: float, worker: int, kind: str, num_bytes: int, during: Instruction | Transfer | None
    ) -> None:
        self._times_s.append(time_s)
        self._workers.append(worker)
        self._kinds.append(_NUMBER_OF[kind])
        self._changes.append(num_bytes)
        self._during.append(during)

    def _fold(self, until_s: float) -> None:
        """Sort and count the changes up to a time."""
        times_s = np.array(self._times_s)
        workers, kinds, changes = np.array(self._workers), np.array(self._kinds), np.array(self._changes)
        order = np.lexsort((times_s, workers))  # stable: keeps a worker's order at equal times
        order = order[times_s[order] <= until_s]
        bounds = np.searchsorted(workers[order], np.arange(len(self._last_s) + 1))
        curves = []
        for worker, level in enumerate(self._levels):
            own = order[bounds[worker] : bounds[worker + 1]]
            steps = np.zeros((len(level), len(own)), dtype=np.int64)
            steps[kinds[own], np.arange(len(own))] = changes[own]
            num_bytes = steps.cumsum(axis=1) + level[:, None]
            if len(own):
                self._count(worker, times_s[own], num_bytes[:-1], own)
                self._host_peaks[worker] = max(self._host_peaks[worker], int(num_bytes[-1].max()))
                level[:] = num_bytes[:, -1]
            curves.append(Curve(times_s[own], num_bytes[:-1], num_bytes[-1]))
        self._curves = self._curves or curves
        left = np.setdiff1d(np.arange(len(times_s)), order)
        self._during = [self._during[index] for index in left]
        self._times_s, self._changes = array("d", times_s[left]), array("q", changes[left])
        self._workers, self._kinds = array("i", workers[left]), array("b", kinds[left])

    def _count(
        self, worker: int, times_s: NDArray[np.float64], num_bytes: NDArray[np.int64], own: NDArray[np.intp]
    ) -> None:
        """Update a worker's peak and the first overflow."""

        def moment(index: int) -> MemoryPeak:
            by_kind = {kind: int(n) for kind, n in zip(KINDS, num_bytes[:, index], strict=True) if n}
            return MemoryPeak(worker, float(times_s[index]), _in_words(self._during[own[index]]), by_kind)

        total = num_bytes.sum(axis=0)
        highest, peak = int(total.argmax()), self._peaks[worker]
        if peak is None or total[highest] > peak.num_bytes:
            self._peaks[worker] = moment(highest)
        if self._limit_bytes is not None and total[highest] > self._limit_bytes:
            first = int((total > self._limit_bytes).argmax())
            if self._overflow is None or times_s[first] < self._overflow.time_s:
                self._overflow = moment(first)


def _in_words(cause: Instruction | Transfer | None) -> str:
    if isinstance(cause, Transfer):
        return f"{cause.kind} {cause.label} arrives"
    return "before anything runs" if cause is None else str(cause)
