"""Memory over time: turns an engine's events into bytes per worker and kind, and their peaks.

An event comes at an instruction's start and also describes changes at its end; a transfer changes bytes on two workers.
So changes don't come in order: they are collected, and sorted from time to time. Sorted ones count for the peaks and
are dropped. Only the first part is recorded as curves, long enough for fill, a few periods and drain.
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

RECORDED_CHANGES = 200_000  # in curves, which is about 20,000 units
_NUMBER_OF: Final = {kind: number for number, kind in enumerate((*KINDS, ON_HOST))}
_OF_A_UNIT: Final = (Op.FORWARD, *BACKWARDS, *COPIES)
_SENDS: Final = with_kind(SEND, ACTIVATION, GRADIENT, MIGRATION)


class ReplicaBytes(Protocol):
    """The memory of a stage on a worker: a replica's `ReplicaMemory`, or several while layers move."""

    def before(self) -> Iterable[Change]:
        """Yield the bytes held before anything runs, as changes."""

    def drained(self) -> Iterable[Change]:
        """Begin a segment; yield what that changes."""

    def changes(self, it: Instruction, size: Size) -> Iterable[Change]:
        """Yield an instruction's changes, in order; `size` is of its unit."""


# Time, worker, kind, additional bytes, and the cause
WorkerChange = tuple[float, int, str, int, Instruction | Transfer | None]


class MemoryExtension:
    """What an extension adds to the memory of workers; made from a pipeline and its stages' `StageMemoryCosts`."""

    def replica(self, worker: int, stage: int) -> ReplicaBytes | None:
        """Return what tracks a worker's stage in place of a `ReplicaMemory`, or None."""
        return None

    def event(self, event: TimelineEvent) -> Iterable[WorkerChange]:
        """Yield the changes of an event that its stage's `ReplicaBytes` doesn't yield."""
        return ()

    def transfer(self, transfer: Transfer) -> Iterable[WorkerChange]:
        """Yield the changes of a transfer that is neither a message between stages nor a sum."""
        return ()


@dataclass(frozen=True)
class MemoryPeak:
    """The memory of a worker at one time."""

    worker: int
    time_s: float
    during: str  # the instruction, or the transfer that arrives
    by_kind: Mapping[str, int]  # bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.by_kind.values())

    @property
    def when(self) -> str:
        """The instruction or transfer, as a phrase."""
        return self.during if " " in self.during else f"in {self.during}"


@dataclass(frozen=True)
class Curve:
    """A worker's memory over time: `num_bytes[:, i]` from `times_s[i]` to the next."""

    times_s: NDArray[np.float64]  # ascending
    num_bytes: NDArray[np.int64]  # [kind, time], kinds as in `memory.KINDS`
    host_bytes: NDArray[np.int64]  # [time] on the host

    def followed_by(self, later: "Curve", after_s: float) -> "Curve":
        """Return this curve and a later one, shifted by `after_s`."""
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
    peaks: tuple[MemoryPeak, ...]  # of the whole run; of equal peaks, the first
    host_peaks: tuple[int, ...]  # most bytes on the host
    limit_bytes: int | None  # memory of a device; None for no limit
    overflow: MemoryPeak | None  # the first excess over the limit on any worker
    end_s: float  # of the recorded part

    @property
    def fullest(self) -> MemoryPeak:
        """The highest peak of all workers; of equal ones, the first worker's."""
        return max(self.peaks, key=lambda peak: peak.num_bytes)

    def followed_by(self, later: "MemoryTimeline") -> "MemoryTimeline":
        """Return the memory of this segment and, right after it, of a later one."""

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

    Args:
        pipeline: the order of work.
        memories: bytes of a replica of every stage.
        costs: sizes of messages.
        limit_bytes: memory of a device; None for no limit.
        holdings: by worker and stage, what tracks the stage's memory; None: made from `memories`.
        start_s: the run's clock at the start.
    """

    # Kinds of transfers whose bytes the sender holds until they have arrived
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
        # [worker, kind] bytes at the last fold
        self._levels = np.zeros((pipeline.num_workers, len(_NUMBER_OF)), dtype=np.int64)
        self._last_s, self._end_s = [start_s] * pipeline.num_workers, start_s
        # Times at which messages in transit were sent, by sender, receiver and kind
        self._in_transit: dict[tuple[int, int, str], deque[float]] = {}
        # Start of the forward of units that are swapped, by worker, stage and unit: copies are reported at their end
        self._swapped: dict[tuple[int, int, int], float] = {}
        self._fold_at = RECORDED_CHANGES  # changes
        self._curves: list[Curve] = []
        self._peaks: list[MemoryPeak | None] = [None] * pipeline.num_workers
        self._host_peaks = [0] * pipeline.num_workers
        self._overflow: MemoryPeak | None = None
        for worker, own in enumerate(self._holdings):
            self._add(start_s, worker, WEIGHTS, 0, None)  # a worker that holds nothing also has an entry
            for holding in own.values():
                self._note(worker, holding.before(), start_s, start_s, None)

    def have_state(self) -> None:
        """Add the optimizer's state at the start, as in all segments of a run but the first."""
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
                self._in_transit.setdefault(connection, deque()).append(start_s)
        for extension in self._extensions:
            for change in extension.event(event):
                self._add(*change)
        if op is Op.SWAP_IN:
            self._swapped.pop((worker, stage, number), None)
        if op in COPIES:  # its start may be before that of instructions already reported
            return
        if op is Op.FORWARD and stage in self._pipeline.swaps:
            self._swapped[worker, stage, number] = start_s
        self._last_s[worker] = start_s
        if len(self._times_s) >= self._fold_at:
            waiting_s = (since_s[0] for since_s in self._in_transit.values() if since_s)
            self._fold(min((*self._last_s, *waiting_s, *self._swapped.values())))
            self._fold_at = max(RECORDED_CHANGES, 2 * len(self._times_s))

    def transfer(self, transfer: Transfer) -> None:
        """Record a transfer between two workers; sums are in place, and change no bytes."""
        if len(transfer.senders) > 1:
            return
        (sender,), (receiver,) = transfer.senders, transfer.receivers
        if transfer.kind in self.between_stages:
            if transfer.num_bytes:
                waiting = self._in_transit[sender, receiver, transfer.kind]
                # Migrated layers and units are reported out of order. The oldest time stays, as `_fold` needs a lower
                # bound.
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
        """Sort the changes up to a time, count them for the peaks, and drop them."""
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
