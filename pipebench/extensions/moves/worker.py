"""A worker whose layers move, and whose stage may measure itself."""

from collections.abc import Mapping
from typing import Final

from pipebench.engine.protocols import Collectives, Handler, Transport, UnitLoss, WorkerExtension
from pipebench.engine.worker import Worker
from pipebench.extensions.moves.block_transfers import BlockTransfers
from pipebench.extensions.moves.monitor import StageMonitor
from pipebench.extensions.moves.segment_cuts import SegmentCuts
from pipebench.extensions.moves.settings import MOVES, settings_of
from pipebench.schedule.instructions import TRANSFER_OPS, Instruction
from pipebench.schedule.operations import ACTIVATION, GRADIENT, RECEIVE, SEND, Op, with_kind

_SENDS: Final = with_kind(SEND, ACTIVATION, GRADIENT)
_RECEIVES: Final = with_kind(RECEIVE, ACTIVATION, GRADIENT)


class MovingWorker(WorkerExtension):
    """Executes moves, and reports to Algorithm 1 if stages balance."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._cuts: SegmentCuts | None = None  # of the segment, if layers may move in it
        self.monitor: StageMonitor | None = None  # if Algorithm 1 balances stages
        self.handlers: Mapping[Op, Handler] = dict.fromkeys(TRANSFER_OPS, self._hand_over)
        if settings_of(worker.setup.pipeline).balances:
            self.handlers |= {op: self._reporting(worker.handlers[op]) for op in (*_SENDS, *_RECEIVES)}

    def begin(self, segment: SegmentCuts | None) -> None:
        """Start a segment of training."""
        worker, self._cuts = self._worker, segment
        if segment is not None:
            worker.crossing.edges = segment
            self.handing_over = BlockTransfers(
                worker.replicas, worker.running, worker.shares, worker.feed, segment, worker.note_memory
            )
        if self.monitor is not None:
            self.monitor.begin()

    def end(self) -> None:
        """If layers have moved, cut the stages as they are now, for evaluations too."""
        cuts, self._cuts = self._cuts, None
        if cuts is not None and cuts.routes.moves.announced:
            self._worker.recut(cuts.last)

    def passed(self, stage: int) -> None:
        """Let one replica run the stage again, if this was the last backward of another."""
        if self._cuts is not None:
            self.handing_over.gather(stage)

    def took(self, instruction: Instruction, seconds: float) -> None:
        """Measure an instruction."""
        if self.monitor is not None:
            self.monitor.note(instruction, seconds)

    def held(self, num_bytes: int) -> None:
        """Measure memory."""
        if self.monitor is not None:
            self.monitor.hold(num_bytes)

    def _hand_over(self, it: Instruction, transport: Transport, _: Collectives) -> None:
        self.handing_over.execute(it, transport)
        self._worker.note_memory()
        self.handing_over.gather(it.stage)

    def _reporting(self, handler: Handler) -> Handler:
        """Return a handler that sends or receives reports, or a decision, after a message of training."""

        def handle(it: Instruction, transport: Transport, collectives: Collectives) -> UnitLoss | None:
            done, worker = handler(it, transport, collectives), self._worker
            if self.monitor is not None and worker.trains:
                (self.monitor.sent if it.op in _SENDS else self.monitor.received)(it, transport)
            return done

        return handle


def moving_worker(worker: Worker) -> MovingWorker:
    """Return the part of moves in a worker."""
    found = worker.extensions[MOVES]
    assert isinstance(found, MovingWorker)
    return found
