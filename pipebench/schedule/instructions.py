"""The instructions that a worker executes, and their text form."""

from typing import NamedTuple

from pipebench.schedule.operations import COPY, MOVE, OPERATIONS, SEND, Op, with_role

_LETTERS = {op: row.letters for op, row in OPERATIONS.items()}
# Backwards, whole or in two parts.
BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
FIRST_PARTS = (Op.BACKWARD, Op.BACKWARD_INPUT)  # those that a unit's backward begins with
ENDS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)  # those that it ends with
# Copies between a device and its host, which run asynchronously.
COPIES = with_role(COPY)
# Transfers of layers, numbered by the first minibatch of the move.
MOVE_OPS = tuple(op for op, row in OPERATIONS.items() if row.counts == MOVE)
# Instructions that send to their peer.
_TOWARDS = (*with_role(SEND), Op.RECUT)


class Instruction(NamedTuple):
    """One instruction of one worker."""

    op: Op
    stage: int  # one of the worker's stages; of a wait for the norm, which is of all of them, the first
    # Of a pass or message, the unit (a minibatch or microbatch); of a wait, gather, free or update, the round; of a
    # pull, the next minibatch or, at the end, the segment's last; of a move, the first minibatch whose forward runs at
    # the layers' new stage
    number: int
    # Of a send, a receive or a transfer of layers, the other stage, of which the unit determines the replica; of a wait
    # for tied weights, the group that sums, see `Pipeline.members`. Else -1, also where a stage is rebuilt with the
    # same layers
    peer: int = -1
    # The round whose reduction a backward (or its weight part) starts, or the wait of a worker without a unit in the
    # round; else -1
    reduce: int = -1
    # A version of the stage's weights, counted in its updates since the drain: of a pass, the one it reads; of an
    # update, the oldest that a later pass may read; of a pull, the one it waits for. Else -1, also where the virtual
    # clock decides
    version: int = -1
    # Of a pass, the updates from `version` to the weights it needs: positive if predicted, negative if moved back
    ahead: int = 0

    def __str__(self) -> str:
        """Return the text form: stage, operation, unit or round, and further fields.

        `2F3@1` is the forward of unit 3 at stage 2 with version 1, `0SA3>1` sends its activation to stage 1, `1RA3<0`
        receives it there, `0B3+1@1` starts all-reduce 1, `0U1@2` makes update 1. `0BI3@1` is the input part of a
        backward, `0BW3@1` its weight part. `0WT1<4` joins the sum of round 1 over the copies of a tie, group 4, and
        waits for it. `0SO3` copies what is saved of unit 3 to the host, `0SI3` back. `0F3@1~2`
        predicts from version 1 the weights 2 updates later, `0B3@3~-2` moves version 3 back by 2.

        If layers move: `1RC9>0` separates those that stage 0 runs forward from 9 on, `1GU7>0` sends what they read of
        unit 7, `0TU7<1` receives it, `0FA7<1@6` repeats their forward there, `1G9>0` sends the layers, `0T9<1` receives
        them; `2RC9` rebuilds a stage whose layers change their activation policies from 9 on.
        """
        arrow = ">" if self.op in _TOWARDS else "<"
        peer = f"{arrow}{self.peer}" if self.peer >= 0 else ""
        reduce = f"+{self.reduce}" if self.reduce >= 0 else ""
        version = f"@{self.version}" if self.version >= 0 else ""
        ahead = f"~{self.ahead}" if self.ahead else ""
        return f"{self.stage}{_LETTERS[self.op]}{self.number}{peer}{reduce}{version}{ahead}"
