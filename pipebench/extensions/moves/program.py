"""A worker's list of instructions in a segment in which layers may move."""

from pipebench.extensions.moves.segment_cuts import SegmentCuts
from pipebench.extensions.moves.transfer_steps import TransferSteps
from pipebench.schedule.instructions import COPIES, Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.orders import order_of
from pipebench.schedule.passes import with_copies
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import Parts, StageProgram, between_flushes, update_of


def moving_program(p: Pipeline, worker: int, num_minibatches: int, whole: Parts, segment: SegmentCuts | None) -> Parts:
    """Return a worker's list in a segment in which layers may move; None: they stay."""
    return whole if segment is None else _moving_program(p, worker, num_minibatches, segment)


def _moving_program(p: Pipeline, worker: int, num_minibatches: int, cuts: SegmentCuts) -> Parts:
    """Yield passes over the edges of each unit, and the transfers of layers in between."""
    (stage,) = p.stages_of(worker)
    program = StageProgram(p, stage, worker, num_minibatches)
    transfers, minibatch, done = TransferSteps(cuts, stage, num_minibatches), p.minibatch, 0
    for units in between_flushes(p, num_minibatches):
        # Decided per unit: layers may begin or cease to swap.
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
