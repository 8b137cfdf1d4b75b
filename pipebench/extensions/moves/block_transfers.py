"""A worker's instructions that let layers leave or join its stages."""

from collections.abc import Callable, Mapping
from functools import partial

from pipebench.checkpoint.share import Share
from pipebench.checkpoint.state import ModelState
from pipebench.engine.feed import Feed
from pipebench.engine.protocols import StageRunner, Transport
from pipebench.engine.replica import Replica
from pipebench.engine.replicas import make_replica
from pipebench.extensions.moves.migration import MigratingReplica, TransferredUnit
from pipebench.extensions.moves.segment_cuts import SegmentCuts
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import MIGRATION, Op


class BlockTransfers:
    """Executes the moves of one segment of training on one worker.

    `replicas` and `running` (see `MigratingReplica`) are updated as layers move; `shares` are the stages' shares of the
    model's state, `phases` the segment's cuts.
    """

    def __init__(
        self,
        replicas: dict[int, Replica],
        running: dict[int, StageRunner],
        shares: Mapping[int, Share],
        feed: Feed,
        phases: SegmentCuts,
        note_memory: Callable[[], None],
    ) -> None:
        self._replicas = replicas
        self._running = running
        self._shares = shares
        self._feed = feed
        self._phases = phases
        self._note_memory = note_memory
        stages = phases.setup.plan.stages
        self._bounds = {stage: (stages[stage].start, stages[stage].stop) for stage in replicas}
        self._given_units: dict[tuple[int, int, int], TransferredUnit] = {}  # by stage, unit and source stage
        self._handlers: dict[Op, Callable[[Instruction, Transport], None]] = {
            Op.RECUT: self._recut,
            Op.GIVE_UNIT: self._give_unit,
            Op.GIVE: self._give,
            Op.TAKE_UNIT: self._take_unit,
            Op.FORWARD_AGAIN: self._forward_again,
            Op.TAKE: self._take,
        }

    def execute(self, instruction: Instruction, transport: Transport) -> None:
        """Execute an instruction that transfers layers or units."""
        self._handlers[instruction.op](instruction, transport)

    def gather(self, stage: int) -> None:
        """Let one replica run a stage again once no transfer and no unit in another replica is left."""
        migrating = self._running[stage]
        if isinstance(migrating, MigratingReplica) and (whole := migrating.whole) is not None:
            self._replicas[stage] = self._running[stage] = whole.replica
            self._bounds[stage] = whole.bounds
            self._note_memory()

    def _recut(self, it: Instruction, _: Transport) -> None:
        migrating = self._migrating(it.stage)
        if it.peer < 0:
            migrating.renew(it.number)
        else:
            migrating.part(self._phases.handed(it.stage, it.peer, it.number))

    def _give_unit(self, it: Instruction, transport: Transport) -> None:
        if self._feed.size(it.number) > 0:
            given = self._migrating(it.stage).give_unit(it.number, it.peer)
            transport.send(MIGRATION, it.number, it.stage, it.peer, given.to_plain())

    def _give(self, it: Instruction, transport: Transport) -> None:
        state = self._migrating(it.stage).give(it.peer)
        transport.send(MIGRATION, it.number, it.stage, it.peer, vars(state))

    def _take_unit(self, it: Instruction, transport: Transport) -> None:
        if self._feed.size(it.number) > 0:
            given = transport.receive(MIGRATION, it.number, it.peer, it.stage)
            self._given_units[it.stage, it.number, it.peer] = TransferredUnit.from_plain(given)

    def _forward_again(self, it: Instruction, _: Transport) -> None:
        given = self._given_units.pop((it.stage, it.number, it.peer), None)
        if given is not None:
            block = self._phases.handed(it.peer, it.stage, it.number)
            draw, place = self._feed.minibatch(it.number), self._feed.place(it.number)
            self._migrating(it.stage).forward_again(block, it.number, given, draw, place)

    def _take(self, it: Instruction, transport: Transport) -> None:
        state = ModelState(**transport.receive(MIGRATION, it.number, it.peer, it.stage))
        self._migrating(it.stage).take(self._phases.handed(it.peer, it.stage, it.number), state)

    def _migrating(self, stage: int) -> MigratingReplica:
        """Return the `MigratingReplica` of a stage, made of its replica at the first call."""
        running = self._running[stage]
        if isinstance(running, MigratingReplica):
            return running
        replica, make = self._replicas[stage], partial(make_replica, self._phases.setup, stage)
        made = MigratingReplica(
            replica, self._bounds[stage], self._shares[stage], self._phases, make, self._note_memory
        )
        self._running[stage] = made
        return made
