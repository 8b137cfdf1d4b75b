"""The recipe's key `parallelism.vpipe.moves`: a list of moves of layers, or a file `moves.json` that a run recorded.

For every move the file has the new cuts, the first minibatch under them, and the reason. A run given this file makes
the same moves at the same minibatches, and so computes the same weights, on any engine.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final

from pipebench.errors import RecipeError, shown
from pipebench.extensions.moves.settings import MoveSettings
from pipebench.recipe.draft import Problems
from pipebench.recipe.plan_file import is_plan_file
from pipebench.recipe.schema import Recipe
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.typed_json import JsonError, Ordinal, Within, read, read_file

FILE_NAME = "moves.json"
VERSION = 1


@dataclass
class RepartitionFile:
    """The file `moves.json`: its format version, and all moves of a run, in order."""

    pipebench_moves: Annotated[int, Within(VERSION, VERSION, str(VERSION))]
    moves: list[RepartitionRecord] = field(default_factory=list)


@dataclass(frozen=True)
class MoveTime:
    """A moment of a run, in epochs or in minibatches; exactly one is given."""

    epochs: Ordinal | None = None
    minibatches: Ordinal | None = None

    def minibatch(self, per_epoch: int) -> int:
        """Return the index of the run's minibatch at that moment."""
        return self.minibatches or (self.epochs or 0) * per_epoch


@dataclass(frozen=True)
class AskedMove:
    """A recipe's request for new cuts at a moment of the run."""

    at: MoveTime
    cuts: tuple[str, ...]  # first layer of every stage but the first
    memory: dict[str, str] | None = None  # see `RepartitionRecord`


def parse_moves(given: Any) -> list[AskedMove]:
    """Return the moves of the key's value: a list of moves, the path of a recorded file, or None.

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


def recipe_moves(recipe: Recipe) -> list[AskedMove]:
    """Return the moves that a recipe asks for."""
    vpipe = recipe.parallelism.vpipe
    return [] if vpipe is None else parse_moves(vpipe.moves)


def load_moves(path: str) -> list[RepartitionRecord]:
    """Read the file of moves that a run recorded.

    Raises:
        RecipeError: it can't be read, or isn't such a file; has every fault.
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
    """Return the content of a file `moves.json`."""
    return json.dumps(asdict(RepartitionFile(VERSION, list(moves))), indent=1) + "\n"


_MOVES = "parallelism.vpipe.moves"


def settings(recipe: Recipe, pipeline: Pipeline) -> MoveSettings:
    """Return the recipe's settings of moves."""
    vpipe = recipe.parallelism.vpipe
    balances, live = vpipe is not None and vpipe.balances, vpipe is None or vpipe.live
    return MoveSettings(balances, live, _choices(recipe))


def _choices(recipe: Recipe) -> tuple[str, ...]:
    """Return the policies besides keep that layers may get in moves; see `MoveSettings.chooses`.

    They are those of the recipe's moves, if it has any, else those of the plan's choice. There is no choice if a plan's
    file sets policies, or the mode chooses none.
    """
    parallelism, asked = recipe.parallelism, recipe_moves(recipe)
    if asked:
        return tuple(sorted({policy for move in asked for policy in (move.memory or {}).values()}))
    if parallelism.vpipe is None or is_plan_file(parallelism.plan) or not parallelism.row.chooses_memory:
        return ()
    return parallelism.vpipe.policies


def _moves(given: Any) -> Problems:
    """Check that moves are a list of moves, or a file that a run recorded."""
    if given is not None and not isinstance(given, str | list):
        yield _MOVES, f"got {shown(given)}, allowed is a list of moves or the file moves.json of a run"
        return
    try:
        parse_moves(given)
    except JsonError as error:
        yield _MOVES, str(error)
    except RecipeError as error:
        yield from ((_MOVES, str(fault)) for fault in error.faults)


def _moving(vpipe: Mapping[str, Any] | None, mode: str, chunks: int | None, order: str | None, relay: bool) -> Problems:
    """Check that the mode has several stages, one per worker, between which layers can move."""
    if vpipe is None or not (vpipe["moves"] or vpipe["repartition"]):
        return
    key = "moves" if vpipe["moves"] else "repartition"
    asking, given = f"parallelism.vpipe.{key}", f"got {shown(vpipe[key])}"
    allowed = f"allowed is {'null' if vpipe['moves'] else 'false'}"
    if mode == AUTO:
        yield asking, f"{given} with mode auto, which plans every mode: {allowed}"
        return
    row = MODES[mode]
    if row.is_one_stage:
        yield asking, f"{given} in mode {mode}, which has one stage: {allowed}"
    elif (chunks or row.chunks) > 1 or is_csv(order or row.order):
        workers = "workers that have one stage each, in an order of work that isn't a file's"
        yield asking, f"{given}, and layers move between {workers}: {allowed}"
    if relay:
        yield (
            "parallelism.relay",
            f"got true with vpipe.{key}, which changes the stages that values pass: allowed is false",
        )


RULES: Final[tuple[tuple[tuple[str, ...], Callable[..., Problems]], ...]] = (
    ((_MOVES,), _moves),
    (tuple(f"parallelism.{name}" for name in ("vpipe", "mode", "chunks", "order", "relay")), _moving),
)
