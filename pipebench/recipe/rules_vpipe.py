"""Rules on vPipe: the modes its parts are for."""

from collections.abc import Mapping
from typing import Any

from pipebench.recipe.draft import Problems, rule
from pipebench.recipe.plan_file import is_plan_file
from pipebench.recipe.schema import ParallelismRecipe, VpipeRecipe
from pipebench.recipe.typecheck import shown
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.pipeline import WHOLE


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
