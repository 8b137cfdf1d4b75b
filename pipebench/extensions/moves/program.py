"""A worker's list of instructions in a segment in which layers may move, and their times in a simulation.

Paper: vPipe (TPDS'21), section 4.3. `repartition_plan` defines K and B of a move. The instructions of a moving block:

- `RC`, recut: the source separates the block after its last forward whose backward runs there, that of B - 1.
- `GU`, give unit: for units of B to K - 1, the source sends the block's inputs and the version that it read right after
  the unit's forward.
- `TU`, take unit, and `FA`, forward again: the target receives these and repeats the forward right before the backward.
- `G`, give: the source sends the block's weights and their state after its last update of them and its last forward
  through them, which may change buffers.
- `T`, take: the target receives them before its first update or forward that needs them.

What has not been sent by the end of the segment is sent then. A stage that takes no block, but whose layers change
policies, rebuilds itself (`RC` without a peer) after the last update before its first forward under the new policies.
"""

from collections.abc import Iterable
from typing import Any, Final

from pipebench.extensions.moves.repartition_plan import BlockTransfer, RepartitionPlan
from pipebench.extensions.moves.segment import MovingSegment, PhaseCosts
from pipebench.extensions.moves.settings import MOVES
from pipebench.schedule.instructions import COPIES, Instruction
from pipebench.schedule.operations import MIGRATION, Op
from pipebench.schedule.orders import order_of
from pipebench.schedule.passes import with_copies
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import Parts, StageProgram, between_flushes, update_of
from pipebench.simulate.simulation import Play, Simulation, SimulationExtension


class TransferSteps:
    """The transfers in one stage's list.

    `moves` is read at every query, since more moves may be announced while the segment runs. Transfers are returned in
    order of execution.
    """

    def __init__(self, moves: RepartitionPlan, stage: int, num_minibatches: int) -> None:
        self._moves = moves
        self._stage = stage
        self._end = num_minibatches

    def after_forward(self, minibatch: int) -> list[Instruction]:
        """Return the transfers after a minibatch's forward and its messages."""
        made = []
        for each in self._gives():
            if minibatch == each.first - 1 and each.first < each.at:
                made.append(self._recut(each))
            elif each.first <= minibatch < each.at:
                made.append(Instruction(Op.GIVE_UNIT, self._stage, minibatch, each.target))
                if each.goes_left and minibatch == each.at - 1:
                    made.append(self._give(each))
        return made

    def before_backward(self, minibatch: int) -> list[Instruction]:
        """Return the transfers before a minibatch's backward and its messages."""
        made = []
        for each in self._takes():
            if each.first <= minibatch < each.at:
                version = self._moves.version(each.source, minibatch)
                made.append(Instruction(Op.TAKE_UNIT, self._stage, minibatch, each.source))
                made.append(Instruction(Op.FORWARD_AGAIN, self._stage, minibatch, each.source, version=version))
        return made

    def before_update(self, minibatch: int) -> list[Instruction]:
        """Return the transfers before the update after a minibatch's backward; in pipelines without flushes."""
        return [
            self._take(each)
            for each in self._takes()
            if not each.goes_left and each.first == minibatch and self._is_under_way(each)
        ]

    def after_update(self, minibatch: int) -> list[Instruction]:
        """Return the transfers after the update after a minibatch's backward; in pipelines without flushes."""
        made = []
        for each in self._moves.at_stage(self._stage):
            if each.first - 1 != minibatch or not self._is_under_way(each):
                continue
            if each.source == self._stage and (not each.goes_left or each.at > self._end):
                made.append(self._give(each))
            elif each.target == self._stage and each.goes_left:
                made.append(self._take(each))
        return made + [
            Instruction(Op.RECUT, self._stage, at)
            for at in self._moves.new_policies(self._stage)
            if minibatch == self._moves.last_updated(self._stage, at) and at <= self._end
        ]

    def after_flush(self, num_minibatches: int) -> list[Instruction]:
        """Return the transfers after a flush, when `num_minibatches` of the segment are done."""
        made = self._whole(
            each
            for each in self._moves.at_stage(self._stage)
            if each.first == each.at and (each.at == num_minibatches or self._end <= num_minibatches < each.at)
        )
        renewed = [at for at in self._moves.new_policies(self._stage) if at == num_minibatches]
        return made + [Instruction(Op.RECUT, self._stage, at) for at in renewed]

    def at_end(self) -> list[Instruction]:
        """Return the transfers at the end of the segment; in pipelines without flushes."""
        return self._whole(each for each in self._moves.at_stage(self._stage) if not self._is_under_way(each))

    def _is_under_way(self, each: BlockTransfer) -> bool:
        """Return whether a unit of the segment runs forward through the block on one stage, backward on the other."""
        return each.first < self._end

    def _whole(self, blocks: Iterable[BlockTransfer]) -> list[Instruction]:
        """Return the transfers of blocks with no unit in flight; sends never wait, so they come before receives."""
        blocks, made = tuple(blocks), []
        for each in (block for block in blocks if block.source == self._stage):
            has_parted = each.first < each.at and each.first <= self._end
            made += [self._give(each)] if has_parted else [self._recut(each), self._give(each)]
        return made + [self._take(each) for each in blocks if each.target == self._stage]

    def _gives(self) -> list[BlockTransfer]:
        return [each for each in self._moves.at_stage(self._stage) if each.source == self._stage]

    def _takes(self) -> list[BlockTransfer]:
        return [each for each in self._moves.at_stage(self._stage) if each.target == self._stage]

    def _recut(self, each: BlockTransfer) -> Instruction:
        return Instruction(Op.RECUT, self._stage, each.at, each.target)

    def _give(self, each: BlockTransfer) -> Instruction:
        return Instruction(Op.GIVE, self._stage, each.at, each.target)

    def _take(self, each: BlockTransfer) -> Instruction:
        return Instruction(Op.TAKE, self._stage, each.at, each.source)


def moving_program(
    p: Pipeline, worker: int, num_minibatches: int, whole: Parts, segment: MovingSegment | None
) -> Parts:
    """Return a worker's list in a segment in which layers may move; `whole`, the core's, if `segment` is None."""
    return whole if segment is None else _moving_program(p, worker, num_minibatches, segment)


def _moving_program(p: Pipeline, worker: int, num_minibatches: int, cuts: MovingSegment) -> Parts:
    """Yield passes with the messages under each unit's cuts, and transfers of layers in between."""
    (stage,) = p.stages_of(worker)
    program = StageProgram(p, stage, worker, num_minibatches)
    transfers, minibatch, done = TransferSteps(cuts, stage, num_minibatches), p.minibatch, 0
    for units in between_flushes(p, num_minibatches):
        # Whether a unit is copied to the host is decided per unit below, since policies change with moves.
        for _, op, unit in with_copies(order_of(p.order).passes(p, worker, units), (stage,)):
            k = minibatch(unit)[0]
            if op is Op.FORWARD:
                if stage == 0:
                    cuts.begin(k)
                program.connect(cuts.at(cuts.forward_layout(k)).pipeline)
                yield program.forward(unit, *program.read(k, unit))
                yield transfers.after_forward(k)
            elif op in COPIES:
                yield [Instruction(op, stage, unit)] if stage in cuts.at(cuts.forward_layout(k)).pipeline.swaps else []
            else:
                yield transfers.before_backward(k)
                program.connect(cuts.at(cuts.backward_layout(k)).pipeline)
                yield program.backward(op, unit)
                if program.left == 0 and not p.flushes:
                    yield transfers.before_update(k)
                    yield update_of(p, [program])
                    yield transfers.after_update(k)
        if p.flushes:
            yield update_of(p, [program])
            done += len(units) // p.microbatches
            yield transfers.after_flush(done)
    if not p.flushes:
        yield transfers.at_end()


_TRANSFERS: Final = (Op.GIVE, Op.GIVE_UNIT, Op.TAKE, Op.TAKE_UNIT)


class MovingPlay(SimulationExtension):
    """Moves in a simulation; does nothing unless layers may move in the segment."""

    def __init__(self, simulation: Simulation) -> None:
        self.plays: dict[Op, Play] = {}
        segment: Any = simulation.part and simulation.part.by_extension.get(MOVES)
        if segment is None:
            return
        costs: PhaseCosts = segment.moving
        neighbours = ((left, left + 1) for left in range(simulation.pipeline.num_stages - 1))
        edges = [edge for left, right in neighbours for edge in ((left, right), (right, left))]
        simulation.messages.connect(MIGRATION, "M", edges, costs.num_bytes, _TRANSFERS)
        self.plays = {
            Op.UPDATE: lambda worker, it, now_s: costs.update_s(it.stage, it.number),
            Op.RECUT: lambda worker, it, now_s: 0.0,
            Op.FORWARD_AGAIN: lambda worker, it, now_s: costs.again_s(it),
        }
