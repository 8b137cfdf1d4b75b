"""The instructions a worker executes, and their text form."""

import enum
import re
from collections.abc import Iterable
from typing import NamedTuple


class Op(enum.IntEnum):
    """What an instruction does."""

    LOAD_INPUT = 0
    RECEIVE_ACTIVATION = 1
    FORWARD = 2
    SEND_ACTIVATION = 3
    RECEIVE_GRADIENT = 4
    BACKWARD = 5
    SEND_GRADIENT = 6
    WAIT_ALL_REDUCE = 7
    WAIT_NORM = 8
    UPDATE = 9


_LETTERS = {
    Op.LOAD_INPUT: "L",
    Op.RECEIVE_ACTIVATION: "RA",
    Op.FORWARD: "F",
    Op.SEND_ACTIVATION: "SA",
    Op.RECEIVE_GRADIENT: "RG",
    Op.BACKWARD: "B",
    Op.SEND_GRADIENT: "SG",
    Op.WAIT_ALL_REDUCE: "W",
    Op.WAIT_NORM: "N",
    Op.UPDATE: "U",
}
_OPS = {letters: op for op, letters in _LETTERS.items()}
_TEXT = re.compile(r"([A-Z]+)(\d+)(?:([<>])(\d+))?(?:\+(\d+))?")


class Instruction(NamedTuple):
    """One instruction of one worker.

    Attributes:
        op: what to do.
        number: the unit (a minibatch, or one microbatch of it) it is about; for waits and updates, the round.
        peer: the other worker of a send or receive, else -1.
        reduce: the round whose all-reduce a backward starts, else -1.
    """

    op: Op
    number: int
    peer: int = -1
    reduce: int = -1

    def __str__(self) -> str:
        """Return the text form, e.g. `F3`, `SA3>1` (to worker 1), `RA3<0`, `B3+1` (starts all-reduce 1), `U1`."""
        arrow = ">" if self.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT) else "<"
        peer = f"{arrow}{self.peer}" if self.peer >= 0 else ""
        reduce = f"+{self.reduce}" if self.reduce >= 0 else ""
        return f"{_LETTERS[self.op]}{self.number}{peer}{reduce}"


def parse(text: str) -> Instruction:
    """Read the text form of an instruction.

    Raises:
        ValueError: the text isn't one.
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[1] not in _OPS:
        raise ValueError(f"{text!r} is not an instruction; expected one of {', '.join(_OPS)} and a number, e.g. F3")
    _, number, _, peer, reduce = match.groups()
    return Instruction(_OPS[match[1]], int(number), int(peer or -1), int(reduce or -1))


def render(instructions: Iterable[Instruction]) -> str:
    """Return a worker's list as text, space-separated."""
    return " ".join(map(str, instructions))
