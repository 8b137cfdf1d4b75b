"""Modes side by side: the best plan of each, and how long finding it took.

The plan asked for comes first: on models of many layers the other modes take most of the time.
"""

import time
from collections.abc import Callable, Iterable, Sequence
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
    known: dict[int, States] | None = None,
    tell: Tell = lambda _done, _total, _search: None,
) -> Comparison:
    """Plan every mode.

    Args:
        request: what to plan.
        mode: whose plan is asked for; None for that of the mode predicted to be fastest.
        others: plan the other modes, too; False plans that mode and data parallelism, `with_others` the rest later.
        known: states by the size that travels, made before; those made here are added.
        tell: is told of every search that begins: modes done, modes in all, what is searched.

    Raises:
        PlanError: no plan of the mode (or of any mode) fits in memory; says by how much, and what would make it fit.
    """
    began_s = time.perf_counter()
    known = {} if known is None else known
    wanted = [name for name in MODES if mode is None or name in (mode, "dp")]
    planners, best_of, refused = _planned(request, mode, wanted, known, tell)
    if mode in refused or not best_of:
        raise PlanError(refused[mode or "pipedream"])
    fastest = _by_time(best_of.values())
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
    found = Comparison(
        best=best,
        others=tuple(each for each in fastest if each is not best),
        dp=dp,
        refused=refused,
        took_s=took_s,
        num_states=len(planners[best.plan.mode].work.states),
        at_most=at_most,
    )
    return with_others(request, found, known, tell) if others else found


def with_others(
    request: Request,
    found: Comparison,
    known: dict[int, States],
    tell: Tell = lambda _done, _total, _search: None,
) -> Comparison:
    """Return a comparison with the modes that it lacks.

    Args:
        request: as it was for the plan asked for.
        found: that plan.
        known: states by the size that travels, as `compare` has left them.
        tell: as there.
    """
    began_s = time.perf_counter()
    _, best_of, refused = _planned(request, found.best.plan.mode, found.unplanned, known, tell)
    all_refused = {**found.refused, **refused}
    took_s = found.took_s["other modes"] + time.perf_counter() - began_s
    return replace(
        found,
        others=tuple(_by_time([*found.others, *best_of.values()])),
        refused={name: all_refused[name] for name in MODES if name in all_refused},
        took_s={**found.took_s, "other modes": took_s},
    )


def _planned(
    request: Request, mode: str | None, wanted: Sequence[str], known: dict[int, States], tell: Tell
) -> tuple[dict[str, Planner], dict[str, PlanEstimate], dict[str, str]]:
    """Return the planners of some modes, their best plans, and why there is none of the others.

    Args:
        request: what to plan; its row is that of `mode`, every other mode has the table's.
        mode: whose plan is asked for.
        wanted: the modes to plan.
        known: states by the size that travels.
        tell: see `compare`.
    """
    planners: dict[str, Planner] = {}
    best_of: dict[str, PlanEstimate] = {}
    refused: dict[str, str] = {}
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
    return planners, best_of, refused


def _by_time(found: Iterable[PlanEstimate]) -> list[PlanEstimate]:
    """Return plans, the fastest first."""
    return sorted(found, key=lambda each: (each.minibatch_s, list(MODES).index(each.plan.mode)))


def _tell(tell: Tell, done: int, total: int, mode: str, search: str) -> None:
    tell(done, total, f"{mode}, {search}")
