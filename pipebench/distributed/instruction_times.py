"""When an instruction began and ended: by the host's clock, or, where a GPU computes, by the GPU's own.

A host that gives work to a GPU runs ahead of it, so its clock says nothing about the work. Events on the GPU's stream
do, without anybody waiting for them; they are read later.
"""

from collections import deque
from collections.abc import Callable

import torch

from pipebench.schedule.instructions import Instruction
from pipebench.simulate.simulation import TimelineEvent

_READ_EVERY = 256  # instructions; fewer events are then waiting to be read

Execute = Callable[[], float]  # returns the seconds it waited for bytes on their way


class HostWatch:
    """Times instructions by the host's clock, and reports them in order.

    Args:
        worker: whose instructions these are.
        clock: the run's clock, seconds.
        report: takes every instruction with its times.
    """

    def __init__(self, worker: int, clock: Callable[[], float], report: Callable[[TimelineEvent], None]) -> None:
        self._worker = worker
        self._clock = clock
        self._report = report

    def timed(self, instruction: Instruction, execute: Execute) -> None:
        """Execute an instruction and report when it ran, now or later."""
        start_s = self._clock()
        stall_s = execute()
        self._report(TimelineEvent(start_s, self._clock(), self._worker, instruction, stall_s))

    def sync_clock(self) -> None:
        """Report everything that was executed."""


class DeviceWatch(HostWatch):
    """Times by events on a GPU's current stream.

    A receive's time is what the stream waited for it: the wait stands in the stream between the instruction's events.
    CUDA gives times between events in milliseconds, in single precision: after ten minutes it can't tell 30 us. So only
    neighbours are compared, and their times are added up here.
    """

    def __init__(self, worker: int, clock: Callable[[], float], report: Callable[[TimelineEvent], None]) -> None:
        super().__init__(worker, clock, report)
        self._waiting: deque[tuple[torch.cuda.Event, torch.cuda.Event, Instruction, float]] = deque()
        self._latest, self._latest_s = self._mark(), clock()  # the event that was read last, and its time

    def timed(self, instruction: Instruction, execute: Execute) -> None:
        """Execute an instruction between two events; some that have come to pass are reported."""
        start = self._mark()
        stall_s = execute()
        self._waiting.append((start, self._mark(), instruction, stall_s))
        if len(self._waiting) >= _READ_EVERY:
            while self._waiting and self._waiting[0][1].query():  # type: ignore[no-untyped-call]
                self._tell()

    def sync_clock(self) -> None:
        """Wait for the GPU, report what is left, and begin to count anew: clocks drift apart."""
        torch.cuda.synchronize()
        while self._waiting:
            self._tell()
        self._latest, self._latest_s = self._mark(), self._clock()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _tell(self) -> None:
        start, end, instruction, stall_s = self._waiting.popleft()
        start_s = self._latest_s + self._latest.elapsed_time(start) / 1e3
        end_s = start_s + start.elapsed_time(end) / 1e3
        self._latest, self._latest_s = end, end_s
        self._report(TimelineEvent(start_s, end_s, self._worker, instruction, stall_s))
