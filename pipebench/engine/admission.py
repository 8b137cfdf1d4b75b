"""The gate every minibatch passes before its first forward, and where a run that is asked to stop ends.

A stop may be asked for at any moment, and workers are at different minibatches then. They must all end at the same
one. Each worker closes its gate and says its *position*: the segment it is in and the first minibatch it has not
let in, rounded up to a whole grain. The greatest position of all workers, by segment and then by minibatch, is
the *cut*; every gate opens up to it and no further.

Why all workers find the same cut. A position is taken under the gate's lock, once, and never changes; the cut is a
function of all positions, and known only when all are. A closed gate lets nothing beyond its position in until the
cut is known, and a worker that turns to a later segment meanwhile waits at that segment's minibatch 0. So no
minibatch beyond the cut was ever begun, by anybody, and every minibatch before it still can be.

Why nobody waits for ever. Positions are taken and exchanged by control threads, which never wait for a training
thread; so the cut becomes known however the training threads wait for each other. Afterwards no gate blocks, and what
the workers have left to do is the rest of one and the same schedule.

Where it is served. A worker between two segments answers for the one it has ended, with all its minibatches. If
that is true of all of them (a stop asked for during an evaluation), the cut is the end of that segment and later
segments have no minibatches; if one of them has begun the next segment, the cut is in that one for everybody.
"""

import contextlib
import itertools
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Protocol

from pipebench.schedule.instructions import MOVE_OPS, Instruction
from pipebench.schedule.operations import OPERATIONS, ROUND
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import programs
from pipebench.schedule.routes import Routes

STOPPING = "pipebench: stopping at the next drain; Ctrl-C again ends now"
_ROUND_OPS = tuple(op for op, row in OPERATIONS.items() if row.about == ROUND)


class Position(NamedTuple):
    """A place in a run; greater means later.

    Attributes:
        segment: index of the segment, -1 before the first.
        bound: the first minibatch of the segment, numbered since the drain, that is not let in.
    """

    segment: int
    bound: int


class Admission(Protocol):
    """What a program asks as it goes: a `AdmissionControl`, or a `Control`, which has one."""

    @property
    def limit(self) -> int:
        """Minibatches of the segment that will run."""

    def admit(self, minibatch: int) -> bool:
        """Return whether a minibatch may begin."""


def admitted_program(
    pipeline: Pipeline, worker: int, num_minibatches: int, admission: Admission, routes: Routes | None = None
) -> Iterator[Instruction]:
    """Yield a worker's instructions for a segment, going over to a shorter segment's as soon as one is agreed on.

    A segment is cut at a multiple of the pipeline's period, the grain. Cut there, every worker's list is the beginning
    of its list for more minibatches, but for the backwards that empty the pipeline: every update averages over as many
    minibatches as it would have without the cut.

    Asks before the first instruction of every grain: that is a forward's (or its load's or receive's), or, on a replica
    that has no unit in the last, short round, its wait or update in that round. So a worker at the end of its list
    has asked for the last grain, and the segment can't be shortened behind its back. What moves layers begins nothing.

    Yields:
        What `programs(pipeline, admission.limit)[worker]` holds, with the limit as it is at the end.
    """
    size = pipeline.period
    admitted = 0  # minibatches before this one may begin
    for executed, instruction in enumerate(programs(pipeline, num_minibatches, routes)[worker]):
        if instruction.op in MOVE_OPS:
            yield instruction
            continue
        if instruction.op in _ROUND_OPS:
            minibatch = instruction.number * pipeline.round_size(instruction.stage)
        else:
            minibatch = pipeline.minibatch(instruction.number)[0]
        if minibatch >= admitted:
            if not admission.admit(minibatch):
                yield from itertools.islice(programs(pipeline, admission.limit, routes)[worker], executed, None)
                return
            admitted = (minibatch // size + 1) * size
        yield instruction


class AdmissionControl:
    """What one worker asks before it begins a minibatch.

    The training thread calls `begin` and `admit`, the control thread the others; any thread reads `limit`.

    Args:
        size: minibatches per grain.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._segment = -1
        self._num_minibatches = 0
        self._begun = 0  # minibatches of the segment that were let in, up to a whole grain
        self._position: Position | None = None
        self._cut: Position | None = None

    def begin(self, segment: int, num_minibatches: int) -> None:
        """Turn to a segment. All workers turn to the same segments, of the same lengths, in ascending order."""
        with self._changed:
            self._segment, self._num_minibatches, self._begun = segment, num_minibatches, 0

    def admit(self, minibatch: int) -> bool:
        """Return whether a minibatch of this segment may begin; waits while that is being agreed on."""
        with self._changed:
            while self._undecided(minibatch):
                self._changed.wait()
            if minibatch >= self.limit:
                return False
            self._begun = max(self._begun, (minibatch // self._size + 1) * self._size)
            return True

    def is_undecided(self, minibatch: int) -> bool:
        """Return whether `admit` would wait."""
        with self._changed:
            return self._undecided(minibatch)

    def _undecided(self, minibatch: int) -> bool:
        if self._position is None or self._cut is not None:
            return False
        return minibatch >= (self._position.bound if self._segment == self._position.segment else 0)

    def end_at(self, minibatch: int) -> None:
        """Let the segment be shorter; nobody has begun that minibatch, and all gates are told the same."""
        with self._changed:
            self._num_minibatches = min(self._num_minibatches, minibatch)

    def close(self) -> Position:
        """Let nothing in beyond what has begun, until `settle`; return where that is, the same every time."""
        with self._changed:
            if self._position is None:
                self._position = Position(self._segment, min(self._begun, self._num_minibatches))
            return self._position

    def settle(self, cut: Position) -> None:
        """Take the greatest position of all workers: open the gate up to it, for good."""
        with self._changed:
            self._cut = cut
            self._changed.notify_all()

    @property
    def segment(self) -> int:
        """The segment this worker is in, or has ended last; -1 before the first."""
        return self._segment

    @property
    def num_minibatches(self) -> int:
        """The length of the segment without a cut."""
        return self._num_minibatches

    @property
    def limit(self) -> int:
        """Minibatches of the segment that will run, as far as is known; final once all that may begin have begun."""
        cut = self._cut
        if cut is None or self._segment < cut.segment:
            return self._num_minibatches
        return min(cut.bound, self._num_minibatches) if self._segment == cut.segment else 0


@dataclass
class StopRequest:
    """Asks a run whose workers share one process to end early.

    Attributes:
        reason: why, once it is asked to; a signal handler may set it at any moment.
    """

    reason: str | None = None


@contextlib.contextmanager
def stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM ask for a stop, and the next one raise KeyboardInterrupt.

    Signals are heard only in the main thread; one that whoever started this process wants ignored stays so.
    """

    def hear(number: int, frame: FrameType | None) -> None:
        if stop.reason is not None:
            raise KeyboardInterrupt
        stop.reason = "interrupted"
        with contextlib.suppress(OSError, RuntimeError):  # the terminal is gone, or in the middle of a line
            print(STOPPING, file=sys.stderr, flush=True)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, hear)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StoppableAdmission:
    """What admits minibatches where all workers share one process: one gate for all, closed where they are.

    Args:
        stop: may ask for an end.
        pipeline: the pipeline.
        num_minibatches: of the segment.
        multiple_of: segments end early at multiples of so many minibatches, see `Control`.
        on_cut: told of the new length where a segment is cut short.
    """

    def __init__(
        self,
        stop: StopRequest,
        pipeline: Pipeline,
        num_minibatches: int,
        multiple_of: int,
        on_cut: Callable[[int], None],
    ) -> None:
        self._stop, self._on_cut = stop, on_cut
        self._gate = AdmissionControl(math.lcm(pipeline.period, multiple_of))
        self._gate.begin(0, num_minibatches)
        self._open = True

    @property
    def limit(self) -> int:
        """Minibatches of the segment that will run."""
        return self._gate.limit

    def end_at(self, minibatch: int) -> None:
        """Let the segment end before a minibatch that nobody has begun."""
        self._gate.end_at(minibatch)
        self._on_cut(self._gate.limit)

    def admit(self, minibatch: int) -> bool:
        """Return whether a minibatch may begin."""
        if self._open and self._stop.reason is not None:
            self._open = False
            self._gate.settle(self._gate.close())
            self._on_cut(self._gate.limit)
        return self._gate.admit(minibatch)
