"""The instructions that a worker executes, and their text form."""

from typing import NamedTuple

from pipebench.schedule.operations import COPY, MOVE, OPERATIONS, SEND, Op, with_role

_LETTERS = {op: row.letters for op, row in OPERATIONS.items()}
# Backwards, whole or in two parts; the part that comes first, and the one that ends a unit on its stage.
BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
FIRST_PARTS = (Op.BACKWARD, Op.BACKWARD_INPUT)
ENDS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
# Copies between a device and its host, which run asynchronously.
COPIES = with_role(COPY)
# Transfers of layers, numbered by the first minibatch of the move.
MOVE_OPS = tuple(op for op, row in OPERATIONS.items() if row.about == MOVE)
# Instructions that send to their peer.
_TOWARDS = (*with_role(SEND), Op.RECUT)


class Instruction(NamedTuple):
    """One instruction of one worker."""

    op: Op
    stage: int  # one of the worker's; a wait for the norm is for all of them and has the first
    # Unit (a minibatch or one microbatch); round, of waits and updates; of a pull, the next minibatch or, at the end,
    # the segment's last; of moves, the first minibatch whose forward runs at the layers' new stage
    number: int
    # The other stage of a send, receive or transfer of layers, else -1, also if a stage is cut anew and keeps its
    # layers. The unit determines its replica. Of a wait for tied weights, the group that sums, see `Pipeline.members`
    peer: int = -1
    reduce: int = -1  # round whose all-reduce a backward, or its weight part, starts, else -1
    # Weights used by a pass; of an update, the oldest that the stage may still request afterwards; of a pull, the one
    # it waits for; counted in the stage's updates since the drain. -1 for all others, and if the clock decides.
    version: int = -1
    # Of a pass: updates from `version` to the weights it needs: predicted if positive, moved back if negative
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
