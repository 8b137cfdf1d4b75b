"""The instruction list of a worker that pushes every gradient to a server and pulls its weights."""

from typing import Any

from pipebench.schedule.instructions import COPIES, Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import Parts, StageProgram, passes_of


def pushing_program(p: Pipeline, worker: int, num_minibatches: int, whole: Parts, _: Any) -> Parts:
    """Return pull, forward, backward, push per minibatch, and a final pull after all pushes.

    A drain leaves the newest weights everywhere, so the first pull is left out: there are as many pulls as pushes.
    """
    (stage,) = p.stages_of(worker)
    program = StageProgram(p, stage, worker, num_minibatches)
    for index, (_, op, unit) in enumerate(passes_of(p, worker, range(num_minibatches))):
        if op is Op.FORWARD:
            pull = [Instruction(Op.PULL, stage, unit)] if index > 0 else []
            yield pull + program.forward(unit, *program.read(unit, unit))
        elif op in COPIES:
            yield [Instruction(op, stage, unit)]
        else:
            yield [Instruction(op, stage, unit), Instruction(Op.PUSH, stage, unit)]
    if num_minibatches > 0:
        yield [Instruction(Op.PULL, stage, num_minibatches - 1, version=num_minibatches)]
