"""Admission control before each minibatch's first forward, and the agreement on where an interrupted run ends.

A stop may be requested while workers are at different minibatches; all must end at the same one. Each worker stops
admitting minibatches and reports its *position*: its segment, and the first minibatch that it has not admitted, rounded
up to a whole grain. The greatest position of all workers is the *cut*; every worker admits the minibatches before it.

Agreement: a position is taken once, under a lock, and never changes, and the cut is a function of all positions. Until
the cut is known, a worker admits nothing beyond its position; one that enters a later segment waits at minibatch 0. So
no worker has started a minibatch beyond the cut, and all minibatches before the cut can still run.

No deadlock: control threads take and exchange positions and never wait for a training thread, so the cut becomes known.
Afterwards nothing blocks, and the workers run the rest of one schedule.

A worker between two segments reports the end of the last one. If all workers do, the cut is that end and later segments
are empty. If one has started the next segment, the cut is in that one.

An evaluation is a segment, too. It has no updates, so its minibatches after the cut are simply left out.
"""

import contextlib
import itertools
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from pipebench.interrupts import comes_again
from pipebench.schedule.instructions import MOVE_OPS, Instruction
from pipebench.schedule.operations import OPERATIONS, ROUND
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import NOTHING, programs

STOPPING = "pipebench: stopping at the next drain; Ctrl-C again ends now"
_ROUND_OPS = tuple(op for op, row in OPERATIONS.items() if row.counts == ROUND)


class Position(NamedTuple):
    """A place in a run; greater means later."""

    segment: int  # index of the segment, -1 before the first
    bound: int  # first minibatch of the segment, numbered since the drain, that is not admitted


def admitted_program(
    pipeline: Pipeline,
    worker: int,
    num_minibatches: int,
    admission: "AdmissionControl",
    by_extension: Mapping[str, Any] = NOTHING,
) -> Iterator[Instruction]:
    """Yield a worker's instructions for a segment, which may be shortened meanwhile.

    A segment is cut at a multiple of the pipeline's period, the grain. Up to there every worker's list is a prefix of
    its list for more minibatches, except for the backwards that empty the pipeline: updates average over as many
    minibatches as without the cut.

    Admission is requested before the first instruction of every grain: a forward (or its load or receive) or, on a
    replica without a unit in the last, short round, that round's wait or update. So a worker at the end of its list has
    requested the last grain, and the segment cannot be shortened afterwards. Instructions that move layers need no
    admission.

    `num_minibatches` is the segment's length if it isn't shortened, `by_extension` has extensions' parts in it.

    Yields:
        `programs(pipeline, admission.limit)[worker]`, with the final limit.
    """
    grain = pipeline.period
    admitted = 0  # minibatches before this one may start
    for executed, instruction in enumerate(programs(pipeline, num_minibatches, by_extension)[worker]):
        if instruction.op in MOVE_OPS:
            yield instruction
            continue
        if instruction.op in _ROUND_OPS:
            minibatch = instruction.number * pipeline.round_size(instruction.stage)
        else:
            minibatch = pipeline.minibatch(instruction.number)[0]
        if minibatch >= admitted:
            if not admission.admit(minibatch):
                yield from itertools.islice(programs(pipeline, admission.limit, by_extension)[worker], executed, None)
                return
            admitted = (minibatch // grain + 1) * grain
        yield instruction


class EvaluationStoppedError(Exception):
    """All workers have agreed on a stop that leaves out minibatches of an evaluation."""


def evaluation_program(
    pipeline: Pipeline, program: Iterable[Instruction], num_minibatches: int, admission: "AdmissionControl"
) -> Iterator[Instruction]:
    """Yield a worker's instructions for an evaluation, without those of minibatches that aren't admitted.

    Afterwards `admission.limit` is final. Gathers of sharded weights are of no minibatch: where there are some, the
    evaluation isn't shortened.
    """
    if pipeline.gathers:
        yield from program
        return
    for instruction in program:
        if admission.admit(pipeline.minibatch(instruction.number)[0]):
            yield instruction
    admission.admit(num_minibatches - 1)


class AdmissionControl:
    """Admits the minibatches of one worker, in grains of `grain` minibatches.

    The training thread calls `begin` and `admit`, the control thread the others; any thread reads `limit`.
    """

    def __init__(self, grain: int) -> None:
        self._grain = grain
        self._changed = threading.Condition()
        self.segment = -1  # the worker's current or last one
        self.num_minibatches = 0  # of the segment, without a cut
        self._admitted = 0  # minibatches of the segment, rounded up to a grain
        self._position: Position | None = None
        self._cut: Position | None = None

    def begin(self, segment: int, num_minibatches: int) -> None:
        """Enter a segment; all workers enter the same segments, of the same lengths, in ascending order."""
        with self._changed:
            self.segment, self.num_minibatches, self._admitted = segment, num_minibatches, 0

    def admit(self, minibatch: int) -> bool:
        """Return whether a minibatch of this segment may start; waits while a cut is being agreed on."""
        with self._changed:
            while self._undecided(minibatch):
                self._changed.wait()
            if minibatch >= self.limit:
                return False
            self._admitted = max(self._admitted, (minibatch // self._grain + 1) * self._grain)
            return True

    def is_undecided(self, minibatch: int) -> bool:
        """Return whether `admit` would wait."""
        with self._changed:
            return self._undecided(minibatch)

    def _undecided(self, minibatch: int) -> bool:
        if self._position is None or self._cut is not None:
            return False
        return minibatch >= (self._position.bound if self.segment == self._position.segment else 0)

    def end_at(self, minibatch: int) -> None:
        """Shorten the segment to end before `minibatch`, which no worker may have started; all workers do the same."""
        with self._changed:
            self.num_minibatches = min(self.num_minibatches, minibatch)

    def stop_admitting(self) -> Position:
        """Stop admitting until `settle`; return the position, the same at every call."""
        with self._changed:
            if self._position is None:
                self._position = Position(self.segment, min(self._admitted, self.num_minibatches))
            return self._position

    def settle(self, cut: Position) -> None:
        """Set the cut, the greatest position of all workers, and admit up to it from now on."""
        with self._changed:
            self._cut = cut
            self._changed.notify_all()

    @property
    def limit(self) -> int:
        """Minibatches of the segment that will run, as far as is known; final once all of them have started."""
        cut = self._cut
        if cut is None or self.segment < cut.segment:
            return self.num_minibatches
        return min(cut.bound, self.num_minibatches) if self.segment == cut.segment else 0


@dataclass
class StopRequest:
    """A request that a run whose workers share one process ends early."""

    reason: str | None = None  # set once requested, possibly by a signal handler


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP inside, if this is the main thread: no other can.

    A signal that is ignored already, as SIGHUP is under nohup, stays ignored.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    """Request a stop at the first SIGINT, SIGTERM or SIGHUP; raise KeyboardInterrupt at the next."""

    def hear(number: int, frame: FrameType | None) -> None:
        if stop.reason is not None:
            if comes_again(number, frame):
                return
            raise KeyboardInterrupt
        stop.reason = "interrupted"
        with contextlib.suppress(OSError, RuntimeError):  # the terminal is gone, or in the middle of a line
            print(STOPPING, file=sys.stderr, flush=True)

    with handling_signals(hear):
        yield


class StoppableAdmission(AdmissionControl):
    """Admission control for all workers of one process, which need no agreement: the cut is at their position.

    Args:
        stop: a request to end the run early.
        pipeline: the segment's.
        num_minibatches: of the segment.
        multiple_of: the segment ends early at multiples of so many minibatches only, as texts in streams require.
        on_cut: called with the segment's new length.
    """

    def __init__(
        self,
        stop: StopRequest,
        pipeline: Pipeline,
        num_minibatches: int,
        multiple_of: int,
        on_cut: Callable[[int], None],
    ) -> None:
        super().__init__(math.lcm(pipeline.period, multiple_of))
        self._stop, self._on_cut, self._open = stop, on_cut, True
        self.begin(0, num_minibatches)

    def end_at(self, minibatch: int) -> None:
        """Shorten the segment to end before `minibatch`, which no worker may have started."""
        super().end_at(minibatch)
        self._on_cut(self.limit)

    def admit(self, minibatch: int) -> bool:
        """Return whether a minibatch may start."""
        if self._open and self._stop.reason is not None:
            self._open = False
            self.settle(self.stop_admitting())
            self._on_cut(self.limit)
        return super().admit(minibatch)
