"""Modes side by side: the best plan of each, and how long finding it took."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pipebench.errors import PlanError
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Comparison, PlanEstimate, Request
from pipebench.planner.states import States
from pipebench.schedule.modes import MODES

Tell = Callable[[int, int, str], None]


def compare(
    request: Request,
    mode: str | None = "pipedream",
    *,
    others: bool = True,
    tell: Tell = lambda _done, _total, _search: None,
) -> Comparison:
    """Plan every mode.

    Args:
        request: what to plan.
        mode: whose plan is asked for; None for that of the mode predicted to be fastest.
        others: plan the other modes, too; False where nobody looks at them, but for data parallelism.
        tell: is told of every search that begins: modes done, modes in all, what is searched.

    Raises:
        PlanError: no plan of the mode (or of any mode) fits in memory; says by how much, and what would make it fit.
    """
    began_s = time.perf_counter()
    planners: dict[str, Planner] = {}
    best_of: dict[str, PlanEstimate] = {}
    refused: dict[str, str] = {}
    known: dict[int, States] = {}
    wanted = [name for name in MODES if others or mode is None or name in (mode, "dp")]
    for done, name in enumerate(wanted):
        if name in request.unsuited and name != mode:
            refused[name] = f"mode {name}: {request.unsuited[name]}"
            continue
        own = request if name == mode or request.row is None else replace(request, row=None)
        planners[name] = Planner(own, name, known=known, tell=partial(_tell, tell, done, len(wanted), name))
        try:
            best_of[name] = planners[name].best()
        except PlanError as error:
            refused[name] = str(error)
    if mode in refused or not best_of:
        raise PlanError(refused[mode or "pipedream"])
    fastest = sorted(best_of.values(), key=lambda each: (each.minibatch_s, list(MODES).index(each.plan.mode)))
    best = best_of[mode] if mode else fastest[0]
    boundless = replace(request, cluster=replace(request.cluster, memory_bytes=None), streams=None)
    dp = best_of.get("dp") or Planner(boundless, "dp").best()
    asked = list(planners.values()) if mode is None else [planners[best.plan.mode]]
    took_s = {
        "search": sum(planner.search_s for planner in asked),
        "simulation": sum(planner.predict_s for planner in asked),
    }
    took_s["other modes"] = time.perf_counter() - began_s - sum(took_s.values())
    bounding_s = time.perf_counter()
    at_most = planners[best.plan.mode].at_most()
    took_s["search"] += time.perf_counter() - bounding_s
    return Comparison(
        best=best,
        others=tuple(each for each in fastest if each is not best),
        dp=dp,
        refused=refused,
        took_s=took_s,
        num_states=len(planners[best.plan.mode].work.states),
        at_most=at_most,
    )


def _tell(tell: Tell, done: int, total: int, mode: str, search: str) -> None:
    tell(done, total, f"{mode}, {search}")
