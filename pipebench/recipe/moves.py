"""The moves that a recipe asks for, written out or as the file that a run has kept: `parallelism.vpipe.moves`."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

from pipebench.errors import Fault, RecipeError
from pipebench.files import read_text
from pipebench.schedule.repartitions import VERSION, RepartitionFile, RepartitionRecord
from pipebench.typed_json import JsonError, Ordinal, read


@dataclass(frozen=True)
class MoveTime:
    """After how much of a run: so many epochs or so many minibatches, one of the two."""

    epochs: Ordinal | None = None
    minibatches: Ordinal | None = None

    def minibatch(self, per_epoch: int) -> int:
        """Return the minibatch of the run, from 0, that comes then."""
        return self.minibatches or (self.epochs or 0) * per_epoch


@dataclass(frozen=True)
class AskedMove:
    """Cuts that a recipe asks for, from some moment of a run on.

    Attributes:
        at: that moment.
        cuts: first layer of every stage but the first.
        memory: see `RepartitionRecord`.
    """

    at: MoveTime
    cuts: tuple[str, ...]
    memory: dict[str, str] | None = None


def asked_moves(given: Any) -> list[AskedMove]:
    """Return the moves that a recipe asks for.

    Args:
        given: a list of moves, the path of a run's file, or None.

    Raises:
        JsonError: an item of the list isn't a move.
        RecipeError: the file can't be read, or has no moves.
    """
    if isinstance(given, str):
        return [AskedMove(MoveTime(minibatches=each.minibatch), each.cuts, each.memory) for each in load_moves(given)]
    if not given:
        return []
    found = read(list[AskedMove], json.dumps(given))
    for index, move in enumerate(found):
        if (move.at.epochs is None) == (move.at.minibatches is None):
            both = "neither" if move.at.epochs is None else "both"
            raise JsonError(f"[{index}].at: got {both} of epochs and minibatches, allowed is exactly one")
    return found


def load_moves(path: str) -> list[RepartitionRecord]:
    """Read the moves that a run has kept.

    Raises:
        RecipeError: they can't be read, or aren't moves.
    """
    text = read_text(path)
    try:
        found = read(RepartitionFile, text)
        if found.pipebench_moves != VERSION:
            raise JsonError(f"pipebench_moves: got {found.pipebench_moves}, allowed is {VERSION}")
        for index, (before, after) in enumerate(itertools.pairwise(found.moves), 1):
            if after.minibatch <= before.minibatch:
                allowed = f"one after that of the move before, {before.minibatch}"
                raise JsonError(f"moves[{index}].minibatch: got {after.minibatch}, allowed is {allowed}")
    except JsonError as error:
        raise RecipeError([Fault(path, "", str(error))]) from error
    return found.moves
