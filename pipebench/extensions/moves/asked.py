"""The moves of layers in `parallelism.vpipe.moves`: a list, or the file that a run recorded.

The file has the cuts from each minibatch on, and why. A run given it cuts at the same places from the same minibatches
on, and computes the same weights on any engine.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pipebench.recipe.schema import Recipe
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.typed_json import JsonError, Ordinal, Within, read, read_file

FILE_NAME = "moves.json"
VERSION = 1


@dataclass
class RepartitionFile:
    """The file: its format version, and all of a run's records in order."""

    pipebench_moves: Annotated[int, Within(VERSION, VERSION, str(VERSION))]
    moves: list[RepartitionRecord] = field(default_factory=list)


@dataclass(frozen=True)
class MoveTime:
    """A moment of a run, in epochs or in minibatches; one of the two is given."""

    epochs: Ordinal | None = None
    minibatches: Ordinal | None = None

    def minibatch(self, per_epoch: int) -> int:
        """Return the minibatch of the run, from 0, at that moment."""
        return self.minibatches or (self.epochs or 0) * per_epoch


@dataclass(frozen=True)
class AskedMove:
    """Cuts to change to at a moment of a run."""

    at: MoveTime
    cuts: tuple[str, ...]  # first layer of every stage but the first
    memory: dict[str, str] | None = None  # see `RepartitionRecord`


def asked_moves(given: Any) -> list[AskedMove]:
    """Return the moves of a recipe: a list of moves, the path of a recorded file, or None.

    Raises:
        JsonError: an item of the list isn't a move.
        RecipeError: the file can't be read, or has no moves.
    """
    if isinstance(given, str):
        return [AskedMove(MoveTime(minibatches=each.minibatch), each.cuts, each.memory) for each in load_moves(given)]
    if not given:
        return []
    found = read(list[AskedMove], given)
    for index, move in enumerate(found):
        if (move.at.epochs is None) == (move.at.minibatches is None):
            both = "neither" if move.at.epochs is None else "both"
            raise JsonError((f"[{index}].at", f"got {both} of epochs and minibatches, allowed is exactly one"))
    return found


def moves_asked(recipe: Recipe) -> list[AskedMove]:
    """Return a recipe's moves."""
    vpipe = recipe.parallelism.vpipe
    return [] if vpipe is None else asked_moves(vpipe.moves)


def load_moves(path: str) -> list[RepartitionRecord]:
    """Read the moves that a run recorded.

    Raises:
        RecipeError: they can't be read, or aren't moves.
    """
    return read_file(RepartitionFile, path, _problems).moves


def _problems(file: RepartitionFile) -> Iterator[tuple[str, str]]:
    for index, (before, after) in enumerate(itertools.pairwise(file.moves), 1):
        if after.minibatch <= before.minibatch:
            allowed = f"one after that of the move before, {before.minibatch}"
            yield f"moves[{index}].minibatch", f"got {after.minibatch}, allowed is {allowed}"


def in_words(memory: Mapping[str, str] | None) -> str:
    """Return the number of layers per policy other than keep, e.g. `5 recompute, 2 swap`."""
    if memory is None:
        return "as before"
    counts = Counter(memory.values())
    return ", ".join(f"{counts[policy]} {policy}" for policy in sorted(counts)) or "all keep"


def to_text(moves: Sequence[RepartitionRecord]) -> str:
    """Return the records as JSON."""
    return json.dumps(asdict(RepartitionFile(VERSION, list(moves))), indent=1) + "\n"
