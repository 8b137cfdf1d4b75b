"""The times of instructions: by the host's clock or, where a GPU computes, by the GPU's events.

A host runs ahead of its GPU, so its clock doesn't time the GPU's work. Events on the GPU's stream do; they are read
later, without waiting.
"""

from collections import deque
from collections.abc import Callable

import torch

from pipebench.schedule.instructions import Instruction
from pipebench.simulate.simulation import TimelineEvent

_READ_EVERY = 256  # instructions, to limit the events that wait to be read

Execute = Callable[[], float]  # returns seconds waited for bytes in transfer


class HostWatch:
    """Times a worker's instructions by the run's clock, in seconds, and reports them in order."""

    def __init__(self, worker: int, clock: Callable[[], float], report: Callable[[TimelineEvent], None]) -> None:
        self._worker = worker
        self._clock = clock
        self._report = report

    def timed(self, instruction: Instruction, execute: Execute) -> None:
        """Execute an instruction and report its times, now or later."""
        start_s = self._clock()
        stall_s = execute()
        self._report(TimelineEvent(start_s, self._clock(), self._worker, instruction, stall_s))

    def sync_clock(self) -> None:
        """Report all executed instructions."""


class DeviceWatch(HostWatch):
    """Times by events on a GPU's current stream.

    A receive's time is the stream's wait for it, between the instruction's events. CUDA measures between events in
    single-precision milliseconds, too coarse after ten minutes to resolve 30 us, so only neighbours are compared and
    their times summed here.
    """

    def __init__(self, worker: int, clock: Callable[[], float], report: Callable[[TimelineEvent], None]) -> None:
        super().__init__(worker, clock, report)
        self._waiting: deque[tuple[torch.cuda.Event, torch.cuda.Event, Instruction, float]] = deque()
        self._latest, self._latest_s = self._mark(), clock()  # the latest event read, and its time

    def timed(self, instruction: Instruction, execute: Execute) -> None:
        """Execute an instruction between two events; report some completed ones."""
        start = self._mark()
        stall_s = execute()
        self._waiting.append((start, self._mark(), instruction, stall_s))
        if len(self._waiting) >= _READ_EVERY:
            while self._waiting and self._waiting[0][1].query():  # type: ignore[no-untyped-call]
                self._tell()

    def sync_clock(self) -> None:
        """Wait for the GPU, report the rest, and restart from the host's clock, since clocks drift apart."""
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
