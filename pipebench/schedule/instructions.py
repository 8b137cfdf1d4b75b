"""The instructions a worker executes, and their text form."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from pipebench.schedule.operations import COPY, MOVE, OPERATIONS, SEND, Op, with_role

_LETTERS = {op: row.letters for op, row in OPERATIONS.items()}
# A backward in one piece or the two parts of one; what comes first of it, and what a stage is done with a unit after.
BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
FIRST_PARTS = (Op.BACKWARD, Op.BACKWARD_INPUT)
ENDS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
# Copies between a device and its host: begun in turn, and over when they are.
COPIES = with_role(COPY)
# What moves layers, told by the minibatch from which on the forward runs elsewhere; that and what moves their units.
HANDING = tuple(op for op, row in OPERATIONS.items() if row.about == MOVE)
HANDING_OVER = (*HANDING, Op.GIVE_UNIT, Op.TAKE_UNIT, Op.FORWARD_AGAIN)
# What goes towards the peer.
_TOWARDS = (*with_role(SEND), Op.RECUT)
_OPS = {letters: op for op, letters in _LETTERS.items()}
_TEXT = re.compile(r"(\d+)([A-Z]+)(\d+)(?:([<>])(\d+))?(?:\+(\d+))?(?:@(\d+))?(?:~(-?\d+))?")


class Instruction(NamedTuple):
    """One instruction of one worker.

    Attributes:
        op: what to do.
        stage: the stage it is done for, one of the worker's. A wait for the norm is for all of them: the first.
        number: the unit (a minibatch, or one microbatch of it) it is about; for waits and updates, the round. A pull is
            for the minibatch that comes next, or at the end of the list, after the segment's last. Where layers are cut
            apart, given or taken, the first minibatch whose forward runs at their new stage.
        peer: the other stage of a send or receive, or the one that layers go to or come from, else -1: where a stage is
            cut anew and keeps its layers, too. The unit tells which of its replicas that is.
        reduce: the round whose all-reduce a backward, or its weight part, starts, else -1.
        version: the weights that a forward or backward uses; of an update, the oldest that the stage may still be
            asked for afterwards; of a pull, the one it waits for. Versions count the stage's updates since the drain.
            -1 for everything else, and where the clock decides.
        ahead: of a forward or backward: how many updates later than `version` the weights are meant to be. They are
            predicted where that is positive, and moved back where it is negative; 0 is the version as it is.
    """

    op: Op
    stage: int
    number: int
    peer: int = -1
    reduce: int = -1
    version: int = -1
    ahead: int = 0

    def __str__(self) -> str:
        """Return the text form: the stage, what it does, the unit or round, and what else there is to know.

        `2F3@1` is the forward of unit 3 at stage 2 with version 1, `0SA3>1` sends its activation to stage 1, `1RA3<0`
        receives it there, `0B3+1@1` starts all-reduce 1, `0U1@2` makes update 1. `0BI3@1` is the input part of
        a backward, `0BW3@1` its weight part. `0SO3` copies what is saved of unit 3 to the host, `0SI3` back.
        `0F3@1~2` predicts from version 1 what the weights are 2 updates later,
        `0B3@3~-2` takes version 3 back by 2.

        Where layers move: `1RC9>0` cuts those apart that stage 0 runs forward from 9 on, `1GU7>0` gives what they read
        of unit 7, `0TU7<1` takes it, `0FA7<1@6` computes them again there, `1G9>0` gives the layers, `0T9<1` takes
        them; `2RC9` cuts a stage anew whose layers, from 9 on, do something else with their activations.
        """
        arrow = ">" if self.op in _TOWARDS else "<"
        peer = f"{arrow}{self.peer}" if self.peer >= 0 else ""
        reduce = f"+{self.reduce}" if self.reduce >= 0 else ""
        version = f"@{self.version}" if self.version >= 0 else ""
        ahead = f"~{self.ahead}" if self.ahead else ""
        return f"{self.stage}{_LETTERS[self.op]}{self.number}{peer}{reduce}{version}{ahead}"


def parse(text: str) -> Instruction:
    """Read the text form of an instruction.

    Raises:
        ValueError: the text isn't one.
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[2] not in _OPS:
        raise ValueError(
            f"{text!r} is not an instruction; expected a stage, one of {', '.join(_OPS)} and a number, e.g. 0F3"
        )
    stage, letters, number, _, *rest, ahead = match.groups()
    peer, reduce, version = (-1 if part is None else int(part) for part in rest)
    return Instruction(_OPS[letters], int(stage), int(number), peer, reduce, version, int(ahead or 0))


def render(instructions: Iterable[Instruction]) -> str:
    """Return a worker's list as text, space-separated."""
    return " ".join(map(str, instructions))
