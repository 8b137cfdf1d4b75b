"""Reads and writes lists of instructions in their text form."""

import re
from collections.abc import Iterable

from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import OPERATIONS

_OPS = {row.letters: op for op, row in OPERATIONS.items()}
_TEXT = re.compile(r"(\d+)([A-Z]+)(\d+)(?:[<>](\d+))?(?:\+(\d+))?(?:@(\d+))?(?:~(-?\d+))?")


def parse(text: str) -> Instruction:
    """Return the instruction of a text, such as `2F0`."""
    match = _TEXT.fullmatch(text)
    assert match is not None, text
    stage, letters, number, *rest, ahead = match.groups()
    peer, reduce, version = (-1 if part is None else int(part) for part in rest)
    return Instruction(_OPS[letters], int(stage), int(number), peer, reduce, version, int(ahead or 0))


def render(instructions: Iterable[Instruction]) -> str:
    return " ".join(map(str, instructions))
