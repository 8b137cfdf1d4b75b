"""Rules on vPipe: the modes its parts are for."""

from collections.abc import Mapping
from typing import Any

from pipebench.errors import RecipeError
from pipebench.recipe.draft import Problems, rule
from pipebench.recipe.moves import asked_moves
from pipebench.recipe.plan_file import is_plan_file
from pipebench.recipe.schema import ParallelismRecipe, VpipeRecipe
from pipebench.recipe.typecheck import shown
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.pipeline import WHOLE
from pipebench.typed_json import JsonError

_MOVES = "parallelism.vpipe.moves"


@rule("parallelism.vpipe.moves")
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


@rule("@cluster", *(f"parallelism.{name}" for name in ("vpipe", "mode", "plan", "chunks", "backward")))
def _choosing(
    cluster: Any, vpipe: Mapping[str, Any] | None, mode: str, plan: Any, chunks: int | None, backward: str | None
) -> Problems:
    """Stages that choose memory policies have one worker each, whole backwards and, to swap, a copy rate."""
    given = VpipeRecipe(**vpipe or {})
    if vpipe is None or given.moves or mode == AUTO or is_plan_file(plan):  # checked by another rule or the file
        return
    chosen = [name for name in ("swap", "recompute") if getattr(given, name)]
    if chosen and not ParallelismRecipe(mode, chunks=chunks, backward=backward).row.chooses:
        names = [name for name, row in MODES.items() if row.chooses]
        allowed = f"chunks: 1 and backward: {WHOLE}" if MODES[mode].chooses else f"mode {' or '.join(names)}"
        why = f"got true in mode {mode}, and is for stages that have a worker each and run backwards whole"
        yield f"parallelism.vpipe.{chosen[0]}", f"{why}: allowed is false, or {allowed}"
    elif given.swap and cluster.pcie_bytes_per_s is None:
        why = f"got true on cluster {cluster.name}, whose file doesn't say how fast devices copy to their hosts"
        yield "parallelism.vpipe.swap", f"{why}: allowed is false, or pcie in the cluster's file"


@rule("parallelism.vpipe", "parallelism.mode")
def _vpipe_auto(vpipe: Mapping[str, Any] | None, mode: str) -> Problems:
    if vpipe is not None and mode == AUTO and not vpipe.get("moves") and VpipeRecipe(**vpipe).policies:
        yield "parallelism.vpipe", "got a mapping with mode auto, which takes rows as they are: allowed is null"


@rule(*(f"parallelism.{name}" for name in ("vpipe", "recompute", "recompute_layers", "swap_layers")))
def _chosen_by_vpipe(
    vpipe: Mapping[str, Any] | None, recompute: bool | None, recomputed: list[str] | None, swapped: list[str] | None
) -> Problems:
    """Memory policies are chosen by vPipe or by the recipe, not both."""
    if vpipe is None or not VpipeRecipe(**vpipe).policies:
        return
    given = {"recompute": recompute, "recompute_layers": recomputed, "swap_layers": swapped}
    for name, value in given.items():
        if value is not None:
            why = f"got {shown(value)} beside vpipe, which chooses layer by layer"
            yield f"parallelism.{name}", f"{why}: allowed is null, or vpipe with swap: false and recompute: false"


@rule("parallelism.vpipe", "parallelism.mode", "parallelism.chunks", "parallelism.order", "parallelism.relay")
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
