"""The extension of a worker: executes moves of layers, and reports measurements of its stage if stages balance."""

from collections.abc import Callable, Mapping
from functools import partial

from pipebench.checkpoint.state import ModelState
from pipebench.engine.protocols import Collectives, Handler, Transport, UnitLoss, WorkerExtension
from pipebench.engine.worker import Worker
from pipebench.engine.worker_replicas import make_replica
from pipebench.extensions.moves.migration import MigratingReplica, TransferredUnit
from pipebench.extensions.moves.monitor import REPORTING, StageMonitor
from pipebench.extensions.moves.segment import MovingSegment
from pipebench.extensions.moves.settings import MOVES, settings_of
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import MIGRATION, Op


class MovingWorker(WorkerExtension):
    """Executes moves, and sends measurements to Algorithm 1 (vPipe) if stages balance.

    While layers move, the worker's `running` has a `MigratingReplica` for the stage; `replicas` and `running` get its
    only replica afterwards.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._cuts: MovingSegment  # the latest segment in which layers may move
        self._moves = False  # whether that is the running one
        self.monitor: StageMonitor | None = None  # if Algorithm 1 balances stages
        self.handlers: Mapping[Op, Handler] = {
            Op.RECUT: partial(self._transfer, self._recut),
            Op.GIVE_UNIT: partial(self._transfer, self._give_unit),
            Op.GIVE: partial(self._transfer, self._give),
            Op.TAKE_UNIT: partial(self._transfer, self._take_unit),
            Op.FORWARD_AGAIN: partial(self._transfer, self._forward_again),
            Op.TAKE: partial(self._transfer, self._take),
        }
        if settings_of(worker.setup.pipeline).balances:
            self.handlers |= {op: self._reporting(worker.handlers[op]) for op in REPORTING}

    def begin(self, segment: MovingSegment | None) -> None:
        """Start a segment of training."""
        self._moves = segment is not None
        if segment is not None:
            self._cuts = segment
            self._worker.crossing.edges = segment
            stages = segment.setup.plan.stages
            self._bounds = {stage: (stages[stage].start, stages[stage].stop) for stage in self._worker.replicas}
            self._given_units: dict[tuple[int, int, int], TransferredUnit] = {}  # by stage, unit and source stage
        if self.monitor is not None:
            self.monitor.begin()

    def end(self) -> None:
        """If layers have moved, make the stages of the last cuts, those for evaluations included."""
        moves, self._moves = self._moves, False
        if moves and self._cuts.announced:
            self._worker.recut(self._cuts.last)

    def passed(self, stage: int) -> None:
        """Return to one replica for the stage, if this was the last backward of another."""
        if self._moves:
            self._gather(stage)

    def took(self, instruction: Instruction, seconds: float) -> None:
        """Record an instruction's duration."""
        if self.monitor is not None:
            self.monitor.note(instruction, seconds)

    def held(self, num_bytes: int) -> None:
        """Record the bytes that the worker holds."""
        if self.monitor is not None:
            self.monitor.note_memory(num_bytes)

    def _transfer(
        self, execute: Callable[[Instruction, Transport], None], it: Instruction, transport: Transport, _: Collectives
    ) -> None:
        execute(it, transport)
        self._worker.measure_memory()
        self._gather(it.stage)

    def _gather(self, stage: int) -> None:
        """Return to one replica for a stage once no transfer, and no unit in another replica, is left."""
        migrating = self._worker.running[stage]
        if isinstance(migrating, MigratingReplica) and (whole := migrating.whole) is not None:
            self._worker.replicas[stage] = self._worker.running[stage] = whole.replica
            self._bounds[stage] = whole.bounds
            self._worker.measure_memory()

    def _recut(self, it: Instruction, _: Transport) -> None:
        migrating = self._migrating(it.stage)
        if it.peer < 0:
            migrating.renew(it.number)
        else:
            migrating.cut_off(self._cuts.moving_block(it.stage, it.peer, it.number))

    def _give_unit(self, it: Instruction, transport: Transport) -> None:
        if self._worker.feed.size(it.number) > 0:
            given = self._migrating(it.stage).give_unit(it.number, it.peer)
            transport.send(MIGRATION, it.number, it.stage, it.peer, given.to_plain())

    def _give(self, it: Instruction, transport: Transport) -> None:
        state = self._migrating(it.stage).give(it.peer)
        transport.send(MIGRATION, it.number, it.stage, it.peer, vars(state))

    def _take_unit(self, it: Instruction, transport: Transport) -> None:
        if self._worker.feed.size(it.number) > 0:
            given = transport.receive(MIGRATION, it.number, it.peer, it.stage)
            self._given_units[it.stage, it.number, it.peer] = TransferredUnit.from_plain(given)

    def _forward_again(self, it: Instruction, _: Transport) -> None:
        given = self._given_units.pop((it.stage, it.number, it.peer), None)
        if given is not None:
            block = self._cuts.moving_block(it.peer, it.stage, it.number)
            draw, place = self._worker.feed.minibatch(it.number), self._worker.feed.place(it.number)
            self._migrating(it.stage).forward_again(block, it.number, given, draw, place)

    def _take(self, it: Instruction, transport: Transport) -> None:
        state = ModelState(**transport.receive(MIGRATION, it.number, it.peer, it.stage))
        self._migrating(it.stage).take(self._cuts.moving_block(it.peer, it.stage, it.number), state)

    def _migrating(self, stage: int) -> MigratingReplica:
        """Return the `MigratingReplica` of a stage; the first call makes it from the stage's replica."""
        worker, running = self._worker, self._worker.running[stage]
        if isinstance(running, MigratingReplica):
            return running
        replica, make = worker.replicas[stage], partial(make_replica, self._cuts.setup, stage)
        made = MigratingReplica(
            replica, self._bounds[stage], worker.shares[stage], self._cuts, make, worker.measure_memory
        )
        worker.running[stage] = made
        return made

    def _reporting(self, handler: Handler) -> Handler:
        """Return a handler that also sends or receives reports, or a decision, after a message of training."""

        def handle(it: Instruction, transport: Transport, collectives: Collectives) -> UnitLoss | None:
            done, worker = handler(it, transport, collectives), self._worker
            if self.monitor is not None and worker.is_training:
                self.monitor.exchange(it, transport)
            return done

        return handle


def moving_worker(worker: Worker) -> MovingWorker:
    """Return a worker's extension for moves."""
    found = worker.extensions[MOVES]
    assert isinstance(found, MovingWorker)
    return found
