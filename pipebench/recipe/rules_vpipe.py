"""Rules on vPipe: the modes its parts are for."""

from collections.abc import Mapping
from typing import Any

from pipebench.recipe.draft import Draft, Problems, rule
from pipebench.recipe.plan_file import is_plan_file
from pipebench.recipe.schema import VpipeRecipe
from pipebench.recipe.typecheck import shown
from pipebench.schedule.modes import AUTO, MODES, Mode
from pipebench.schedule.pipeline import WHOLE


@rule
def _choosing(cluster: Any, vpipe: Mapping[str, Any] | None, mode: str, row: Mode, plan: Any) -> Problems:
    """Stages that choose memory policies have one worker each, whole backwards and, to swap, a copy rate."""
    given = VpipeRecipe(**vpipe or {})
    if vpipe is None or given.moves or is_plan_file(plan):  # checked by another rule or the file
        return
    chosen = [name for name in ("swap", "recompute") if getattr(given, name)]
    if chosen and not row.chooses:
        names = [name for name, each in MODES.items() if each.chooses]
        allowed = f"chunks: 1 and backward: {WHOLE}" if MODES[mode].chooses else f"mode {' or '.join(names)}"
        why = f"got true in mode {mode}, and is for stages that have a worker each and run backwards whole"
        yield f"parallelism.vpipe.{chosen[0]}", f"{why}: allowed is false, or {allowed}"
    elif given.swap and cluster.pcie_bytes_per_s is None:
        why = f"got true on cluster {cluster.name}, whose file doesn't say how fast devices copy to their hosts"
        yield "parallelism.vpipe.swap", f"{why}: allowed is false, or pcie in the cluster's file"


@rule
def _vpipe_auto(vpipe: Mapping[str, Any] | None, mode: str) -> Problems:
    if vpipe is not None and mode == AUTO and not vpipe.get("moves") and VpipeRecipe(**vpipe).policies:
        yield "parallelism.vpipe", "got a mapping with mode auto, which takes rows as they are: allowed is null"


@rule
def _chosen_by_vpipe(draft: Draft, vpipe: Mapping[str, Any] | None) -> Problems:
    """Memory policies are chosen by vPipe or by the recipe, not both."""
    if vpipe is None or not VpipeRecipe(**vpipe).policies:
        return
    for name, value in draft.given("parallelism", "recompute", "recompute_layers", "swap_layers").items():
        why = f"got {shown(value)} beside vpipe, which chooses layer by layer"
        yield f"parallelism.{name}", f"{why}: allowed is null, or vpipe with swap: false and recompute: false"
