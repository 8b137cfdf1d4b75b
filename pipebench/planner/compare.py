"""The best plan of every mode, and the time that planning took.

The requested plan comes first: on models of many layers the other modes take most of the time.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from pipebench.errors import PlanError
from pipebench.planner.choices import least_memory
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Comparison, PlanEstimate, Request
from pipebench.planner.states import PlanningCache
from pipebench.schedule.modes import MODES


def compare(
    request: Request,
    mode: str | None = "pipedream",
    *,
    others: bool = True,
    cache: PlanningCache | None = None,
    on_search: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Plan a mode, None for the one predicted to be fastest, and the other modes.

    Args:
        request: what to plan.
        mode: the requested mode.
        others: whether to plan the other modes; if not, only data parallelism, and `with_others` adds the rest.
        cache: as in `ModeRequest`.
        on_search: called as each search begins, with `planning mode 2 of 6: gpipe, flat`.

    Raises:
        PlanError: no plan of the mode (or of any mode) fits in memory; says by how much, and what would make it fit.
    """
    began_s = time.perf_counter()
    cache = PlanningCache() if cache is None else cache
    wanted = _choosable_modes(request, cache) if mode is None else [name for name in MODES if name in (mode, "dp")]
    planners, best_of, refused = _planned(request, mode, wanted, cache, on_search)
    if mode in refused or not best_of:
        raise PlanError(refused[mode] if mode else _why_no_mode_fits(planners, refused))
    fastest = _by_time(best_of.values())
    best = best_of[mode] if mode else fastest[0]
    unlimited = replace(request.cluster, memory_bytes=None)
    boundless = replace(request, row=None, cluster=unlimited, streams=None)  # the request's row is that of `mode`
    dp = best_of.get("dp") or Planner(boundless, "dp").best()
    planner = planners[best.plan.mode]
    at_most = planner.at_most()
    asked = list(planners.values()) if mode is None else [planner]
    took_s = {"search": sum(each.search_s for each in asked), "simulation": sum(each.predict_s for each in asked)}
    took_s["other modes"] = time.perf_counter() - began_s - sum(took_s.values())
    slower = tuple(each for each in fastest if each is not best)
    states = planner.work.states
    found = Comparison(best, slower, dp, refused, took_s, len(states), at_most, not states.is_chain)
    return with_others(request, found, cache, on_search) if others else found


def with_others(
    request: Request, found: Comparison, cache: PlanningCache, on_search: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Add the modes that a comparison lacks; arguments as in `compare`."""
    began_s = time.perf_counter()
    planned = 1 + len(found.others) + len(found.refused)
    _, best_of, refused = _planned(request, found.best.plan.mode, found.unplanned, cache, on_search, planned)
    all_refused = {**found.refused, **refused}
    took_s = found.took_s["other modes"] + time.perf_counter() - began_s
    return replace(
        found,
        others=tuple(_by_time([*found.others, *best_of.values()])),
        refused={name: all_refused[name] for name in MODES if name in all_refused},
        took_s={**found.took_s, "other modes": took_s},
    )


def _planned(
    request: Request,
    mode: str | None,
    wanted: Sequence[str],
    cache: PlanningCache,
    on_search: Callable[[str], None],
    planned: int = 0,
) -> tuple[dict[str, Planner], dict[str, PlanEstimate], dict[str, str]]:
    """Return the planners of the `wanted` modes, their best plans, and the reasons of the modes without one.

    `request.row` applies to `mode` only; other modes use the table's row. `planned` modes were planned before.
    """
    total = planned + len(wanted)
    planners: dict[str, Planner] = {}
    best_of: dict[str, PlanEstimate] = {}
    refused: dict[str, str] = {}
    for number, name in enumerate(wanted, planned + 1):
        if name in request.unsuited and name != mode:
            refused[name] = f"mode {name}: {request.unsuited[name]}"
            continue
        own = request if name == mode or request.row is None else replace(request, row=None)
        report = partial(_report, on_search, f"planning mode {number} of {total}: {name}")
        planners[name] = Planner(own, name, cache=cache, on_search=report)
        try:
            best_of[name] = planners[name].best()
        except PlanError as error:
            refused[name] = str(error)
    return planners, best_of, refused


def _report(on_search: Callable[[str], None], mode: str, search: str) -> None:
    on_search(f"{mode}, {search}")


def _why_no_mode_fits(planners: Mapping[str, Planner], refused: Mapping[str, str]) -> str:
    """Return the reason of the mode that needs least memory."""
    nearest = min(planners, key=lambda name: least_memory(planners[name]), default=next(iter(refused)))
    return f"none of {len(refused)} modes has a plan; the nearest is {nearest}: {refused[nearest]}"


def _choosable_modes(request: Request, cache: PlanningCache) -> list[str]:
    """Return the modes to choose from: sharded ones only if data parallelism doesn't fit in memory."""
    try:
        Planner(request, "dp", cache=cache).best()
    except PlanError:
        return [*MODES]
    return [name for name, row in MODES.items() if not row.is_sharded]


def _by_time(found: Iterable[PlanEstimate]) -> list[PlanEstimate]:
    return sorted(found, key=lambda each: (each.minibatch_s, list(MODES).index(each.plan.mode)))
