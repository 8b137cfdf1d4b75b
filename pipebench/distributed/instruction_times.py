"""The times of instructions and operations: by the host's clock or, if a GPU computes, by events on the GPU.

A host runs ahead of its GPU, so its clock doesn't time the GPU's work. Events on the GPU's streams do. They are read
later, without waiting.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pipebench.schedule.instructions import Instruction
from pipebench.simulate.simulation import TimelineEvent

_READ_EVERY = 256  # moments and calls that wait; limits the number of events in use


def runs_ahead(device: torch.device) -> bool:
    """Return whether the host runs ahead of a device, which it does of a GPU."""
    return device.type == "cuda"


@dataclass(slots=True, eq=False)
class Moment:
    """A time on the run's clock. A GPU's is known once the GPU has reached the event: see `HostTimer.then`."""

    s: float = 0.0  # seconds, once known
    event: Any = None  # a CUDA event; None for a time of the host
    kept: bool = False  # whether the event is not reused for another moment
    since: "Moment | None" = None  # if this is an operation's end, a kept moment before its start


class HostTimer:
    """Times a worker's work by the host's clock and reports its instructions in order.

    Args:
        worker: its index.
        clock: the run's clock, seconds.
        report: gets every instruction with its times.
    """

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
        """Return the moment at which the computations launched so far are done; `keep` it to use it for `ended`."""
        return Moment(self.clock())

    def ended(self, wait: Callable[[], None], since: Moment) -> Moment:
        """Return the moment at which an operation ended, which computations have been made to wait for.

        Args:
            wait: makes the current stream wait for the operation.
            since: a kept moment before the operation's start.
        """
        return self.mark()

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` once all moments so far are known: now, or later if a GPU has not reached them."""
        act()

    def sync_clock(self) -> None:
        """Wait until all work is done, so that all moments are known."""


class DeviceTimer(HostTimer):
    """Times a worker's work by events on its GPU's current stream.

    CUDA measures the time between two events in single-precision milliseconds. After ten minutes that is too coarse to
    resolve 30 us. So only neighbouring events are compared, and their times are summed here.

    Args:
        direct: whether operations of NCCL are timed, which run on NCCL's streams. Their ends are then measured on a
            further stream that only waits for them. Computations wait first, because the first wait lets NCCL free the
            operation's tensors. So an operation that ends before that second wait is launched seems to end at the
            launch.
    """

    def __init__(
        self, worker: int, clock: Callable[[], float], report: Callable[[TimelineEvent], None], *, direct: bool = False
    ) -> None:
        super().__init__(worker, clock, report)
        self.direct = direct
        self._beside = torch.cuda.Stream() if direct else None  # type: ignore[no-untyped-call]
        self._free: list[Any] = []  # events to reuse
        self._waiting: deque[Moment | Callable[[], None]] = deque()  # moments to read and calls to make, in order
        self._latest = self._now()  # the latest moment of the computing stream that has been read

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
        """Read the moments that the GPU has reached, and make the calls between them, in order."""
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
            unused = first
            if first.since is None:  # on the computing stream: the next moment is measured from this one
                unused, self._latest = self._latest, first
            if not unused.kept:
                self._free.append(unused.event)


_MAX_AHEAD = 2  # launched and unfinished forwards or backwards: one running, one queued


class Pace:
    """Keeps the host at most two forwards or backwards ahead of `device`; does nothing on a CPU.

    Launches on a GPU are asynchronous. Without a limit the host would run a whole segment ahead: it would allocate
    memory for all of it, notice a stop or a lost peer late, and report progress that the GPU has not made.

    It can't deadlock, since it waits only for earlier work of the same list.
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
        if len(self._ends) > _MAX_AHEAD:
            self._ends.popleft().synchronize()
