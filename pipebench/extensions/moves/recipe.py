"""What a recipe says of moves: `parallelism.vpipe`, where it repartitions."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from pipebench.errors import RecipeError
from pipebench.extensions.moves.asked import asked_moves, moves_asked
from pipebench.extensions.moves.settings import MoveSettings
from pipebench.recipe.draft import Problems
from pipebench.recipe.plan_file import is_plan_file
from pipebench.recipe.schema import Recipe
from pipebench.recipe.typecheck import shown
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.pipeline import Pipeline
from pipebench.typed_json import JsonError

_MOVES = "parallelism.vpipe.moves"


def settings(recipe: Recipe, pipeline: Pipeline) -> MoveSettings:
    """Return how layers move."""
    vpipe = recipe.parallelism.vpipe
    balances, live = vpipe is not None and vpipe.balances, vpipe is None or vpipe.live
    return MoveSettings(balances, live, _choices(recipe))


def _choices(recipe: Recipe) -> tuple[str, ...]:
    """Return the memory policies that layers may choose after a move: those of the moves, or the initial choice.

    If a plan's file sets policies, or vPipe chooses none, layers keep theirs.
    """
    parallelism, asked = recipe.parallelism, moves_asked(recipe)
    if asked:
        return tuple(sorted({policy for move in asked for policy in (move.memory or {}).values()}))
    if parallelism.vpipe is None or is_plan_file(parallelism.plan) or not parallelism.row.chooses:
        return ()
    return parallelism.vpipe.policies


def _moves(given: Any) -> Problems:
    """Moves are a list, or a file that a run recorded."""
    if given is not None and not isinstance(given, str | list):
        yield _MOVES, f"got {shown(given)}, allowed is a list of moves or the file moves.json of a run"
        return
    try:
        asked_moves(given)
    except JsonError as error:
        yield _MOVES, str(error)
    except RecipeError as error:
        yield from ((_MOVES, str(fault)) for fault in error.faults)


def _moving(vpipe: Mapping[str, Any] | None, mode: str, chunks: int | None, order: str | None, relay: bool) -> Problems:
    """Layers move only between workers with one stage each."""
    if vpipe is None or not (vpipe["moves"] or vpipe["repartition"]):
        return
    key = "moves" if vpipe["moves"] else "repartition"
    asking, given = f"parallelism.vpipe.{key}", f"got {shown(vpipe[key])}"
    allowed = f"allowed is {'null' if vpipe['moves'] else 'false'}"
    if mode == AUTO:
        yield asking, f"{given} with mode auto, which plans every mode: {allowed}"
        return
    row = MODES[mode]
    if row.shape in ("one", "one-stage"):
        yield asking, f"{given} in mode {mode}, which has one stage: {allowed}"
    elif (chunks or row.chunks) > 1 or is_csv(order or row.order):
        workers = "workers that have one stage each, in an order of work that isn't a file's"
        yield asking, f"{given}, and layers move between {workers}: {allowed}"
    if relay:
        yield "parallelism.relay", f"got true with vpipe.{key}, which changes who hands on what: allowed is false"


RULES: Final[tuple[tuple[tuple[str, ...], Callable[..., Problems]], ...]] = (
    ((_MOVES,), _moves),
    (tuple(f"parallelism.{name}" for name in ("vpipe", "mode", "chunks", "order", "relay")), _moving),
)
