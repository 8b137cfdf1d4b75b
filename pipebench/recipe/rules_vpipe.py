"""Rules on vPipe: which modes its parts are for."""

from collections.abc import Mapping
from typing import Any

from pipebench.errors import RecipeError
from pipebench.recipe.draft import Problems, rule
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.moves import asked_moves
from pipebench.recipe.typecheck import shown
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.modes import AUTO, MODES
from pipebench.typed_json import JsonError

_MOVES = "parallelism.vpipe.moves"


@rule("parallelism.vpipe.moves")
def _moves(given: Any) -> Problems:
    """Moves are a list of them, or a file that a run has kept."""
    if given is not None and not isinstance(given, str | list):
        yield _MOVES, f"got {shown(given)}, allowed is a list of moves or the file moves.json of a run"
        return
    try:
        asked_moves(given)
    except JsonError as error:
        yield _MOVES, str(error)
    except RecipeError as error:
        yield from ((_MOVES, str(fault)) for fault in error.faults)


@rule(
    "parallelism.vpipe", "parallelism.mode", "parallelism.chunks", "parallelism.order", "parallelism.relay",
    "engine.kind",
)  # fmt: skip
def _moving(
    vpipe: Mapping[str, Any] | None, mode: str, chunks: int | None, order: str | None, relay: bool, kind: str
) -> Problems:
    """Layers move between stages of workers that have one each."""
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
    if not ENGINES[kind].trains:
        yield asking, f"{given} with engine.kind {kind}, which trains nothing: {allowed}"
    if vpipe["live"] and ENGINES[kind].in_processes:
        yield (
            "parallelism.vpipe.live",
            f"got true with engine.kind {kind}, where layers move at drains: allowed is false",
        )
