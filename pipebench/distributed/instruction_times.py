"""The times of instructions and operations: by the host's clock or, where a GPU computes, by the GPU's events.

A host runs ahead of its GPU, so its clock doesn't time the GPU's work. Events on the GPU's streams do; they are read
later, without waiting.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pipebench.schedule.instructions import Instruction
from pipebench.simulate.simulation import TimelineEvent

_READ_EVERY = 256  # marks and reports, to limit the events that wait to be read


def runs_ahead(device: torch.device) -> bool:
    """Return whether a device is a GPU, of which the host runs ahead."""
    return device.type == "cuda"


@dataclass(slots=True, eq=False)
class Moment:
    """A time on the run's clock, in seconds. A GPU's is known when it has come there: `HostTimer.then`."""

    s: float = 0.0
    event: Any = None  # of CUDA
    kept: bool = False  # whether the event stays its own
    since: "Moment | None" = None  # of an operation's end: a kept moment before its start


class HostTimer:
    """Times a worker's work by the run's clock, in seconds, and reports its instructions in order."""

    direct = False  # whether operations between GPUs, by NCCL, are timed

    def __init__(self, worker: int, clock: Callable[[], float], report: Callable[[TimelineEvent], None]) -> None:
        self._worker = worker
        self.clock = clock
        self._report = report

    def timed(self, instruction: Instruction, execute: Callable[[], None]) -> None:
        """Execute an instruction and report its times, now or later."""
        start = self.mark()
        execute()
        end = self.mark()
        self.then(lambda: self._report(TimelineEvent(start.s, end.s, self._worker, instruction)))

    def mark(self, *, keep: bool = False) -> Moment:
        """Return the moment at which all computing until here is done; `keep` it for `ended`."""
        return Moment(self.clock())

    def ended(self, wait: Callable[[], None], since: Moment) -> Moment:
        """Return when an operation ended, for which computing has waited; at the latest now.

        `wait` waits for it again; `since` is a kept moment before its start.
        """
        return self.mark()

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` as soon as all moments until here are known."""
        act()

    def sync_clock(self) -> None:
        """Let all moments be known, with all work done."""


class DeviceTimer(HostTimer):
    """Times by events on a GPU's current stream.

    CUDA measures between events in single-precision milliseconds, too coarse after ten minutes to resolve 30 us, so
    only neighbours are compared and their times summed here.

    With `direct` operations, which have streams of NCCL's, a stream that only waits for them tells when they end: as
    the computing stream would if it computed nothing. It waits after the computing stream does, because the first wait
    frees what NCCL works on. So an operation that ends before its wait is even launched seems to end at the launch.
    """

    def __init__(
        self, worker: int, clock: Callable[[], float], report: Callable[[TimelineEvent], None], *, direct: bool = False
    ) -> None:
        super().__init__(worker, clock, report)
        self.direct = direct
        self._beside = torch.cuda.Stream() if direct else None  # type: ignore[no-untyped-call]
        self._free: list[Any] = []
        self._waiting: deque[Moment | Callable[[], None]] = deque()
        self._latest = self._now()  # of the computing stream, the latest moment read

    def timed(self, instruction: Instruction, execute: Callable[[], None]) -> None:
        """Execute an instruction between two events; report some completed ones."""
        super().timed(instruction, execute)
        if len(self._waiting) >= _READ_EVERY:
            self._read()

    def mark(self, *, keep: bool = False) -> Moment:
        """See `HostTimer`."""
        moment = Moment(event=self._recorded(), kept=keep)
        self._waiting.append(moment)
        return moment

    def ended(self, wait: Callable[[], None], since: Moment) -> Moment:
        """See `HostTimer`."""
        if self._beside is None:
            return self.mark()
        with torch.cuda.stream(self._beside):
            wait()
            moment = Moment(event=self._recorded(), since=since)
        self._waiting.append(moment)
        return moment

    def then(self, act: Callable[[], None]) -> None:
        """See `HostTimer`."""
        self._waiting.append(act)

    def sync_clock(self) -> None:
        """Wait for the GPU, read the rest, and restart from the host's clock, since clocks drift apart."""
        torch.cuda.synchronize()
        self._read()
        self._latest = self._now()

    def _now(self) -> Moment:
        return Moment(self.clock(), self._recorded())

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read(self) -> None:
        """Read what has happened, in order."""
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, Moment) and not first.event.query():
                return
            self._waiting.popleft()
            if not isinstance(first, Moment):
                first()
                continue
            before = first.since or self._latest
            first.s = before.s + before.event.elapsed_time(first.event) / 1e3
            done = first
            if first.since is None:
                done, self._latest = self._latest, first
            if not done.kept:
                self._free.append(done.event)


_AHEAD = 2  # launched and unfinished forwards or backwards: one running, one queued


class Pace:
    """Keeps the host at most two forwards or backwards ahead of `device`; does nothing on a CPU.

    Launches on a GPU are asynchronous. Without a limit the host would run a whole segment ahead: it would allocate for
    all of it, notice a stop or a lost peer late, and report false progress.

    It cannot deadlock, since it waits only for earlier work of the same list.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Record the launch of a forward or backward; wait for the one two before it."""
        if not runs_ahead(self._device):
            return
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # sleeps: a waiting host may share a core
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > _AHEAD:
            self._ends.popleft().synchronize()
