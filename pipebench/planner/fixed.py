"""The best cuts for a given number of replicas per stage, by dynamic programming over stages and cuts.

Each stage is priced at the links that its workers span.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.model.plan import too_few_places
from pipebench.planner.activations import Floats
from pipebench.planner.coarsening import MOST_EXACT, is_coarsened, refined
from pipebench.planner.cost_models import CostModel, StageGrid, UnitWork
from pipebench.planner.flat import SearchStage, renumbered
from pipebench.planner.placement_costs import along, stage_level


def plan_fixed(
    work: UnitWork,
    model: CostModel,
    cluster: Cluster,
    replicas: Sequence[int],
    *,
    devices: Sequence[Sequence[int]] | None = None,
    fits: Callable[[StageGrid, int], NDArray[np.bool_]] | None = None,
) -> tuple[SearchStage, ...]:
    """Return the cuts with the smallest bottleneck, exact up to `coarsening.MOST_EXACT` states.

    Args:
        work: the model at the size of a unit.
        model: the cost model.
        cluster: the links.
        replicas: of every stage.
        devices: of every stage's replicas; None: in order along the devices.
        fits: returns whether the stages of a grid fit in memory as stage `index`, [start, stop]; None: all do.

    Raises:
        PlanError: more stages than places to cut, or no cuts whose stages fit.
    """
    states, last = work.states, len(work.states) - 1
    if len(replicas) > last:
        problem = f"{len(replicas)} stages were asked for, but the model can be cut in {last} at most"
        raise PlanError(too_few_places(states.rows, problem, ties=states.parts_ties))
    placed = along(replicas) if devices is None else devices
    exactly = partial(_plan_exactly, model=model, cluster=cluster, replicas=replicas, devices=placed, fits=fits)

    def solve(chosen: Sequence[int]) -> tuple[float, tuple[SearchStage, ...]] | None:
        bottleneck_s, stages = exactly(replace(work, states=states.select(chosen)))
        return bottleneck_s, renumbered(stages, chosen)

    if is_coarsened(states) and len(replicas) < MOST_EXACT // 2:
        found = refined(states, solve, operator.itemgetter(0), lambda plan: [stage.start for stage in plan[1][1:]])
        assert found is not None
        return found[1]
    return exactly(work)[1]


def _plan_exactly(
    work: UnitWork,
    model: CostModel,
    cluster: Cluster,
    replicas: Sequence[int],
    devices: Sequence[Sequence[int]],
    fits: Callable[[StageGrid, int], NDArray[np.bool_]] | None,
) -> tuple[float, tuple[SearchStage, ...]]:
    """Return the smallest bottleneck and the stages that have it; see `plan_fixed`."""
    states, last = work.states, len(work.states) - 1
    outside = ~states.inside
    best = np.where(np.arange(last + 1) == 0, 0.0, np.inf)
    before: list[np.ndarray] = []  # per stage: the best start for every stop
    later: dict[tuple[Level, int], Floats] = {}  # seconds of the stages after the first, by links and replicas
    for index, m in enumerate(replicas):
        starts = np.arange(1) if index == 0 else np.arange(index, last)
        level = stage_level(cluster, model, devices, index)
        if index == 0:
            seconds = model.terms(StageGrid(work, starts), level, first=True).seconds(float(m))
        else:
            if (level, m) not in later:
                terms = model.terms(StageGrid(work, np.arange(1, last)), level, first=False)
                later[level, m] = np.broadcast_to(terms.seconds(float(m)), (last - 1, last + 1))
            seconds = later[level, m][index - 1 :]
        barred = outside[starts] if fits is None else outside[starts] | ~fits(StageGrid(work, starts), index)
        path = np.where(barred, np.inf, np.maximum(best[starts, None], seconds))
        if index < len(replicas) - 1:
            path[:, -1] = np.inf  # leaves layers for the stages after it
        nearest = path.argmin(0)
        best = path[nearest, np.arange(last + 1)]
        before.append(starts[nearest])
    if not np.isfinite(best[last]):
        raise PlanError(f"the model can't be cut in {len(replicas)} stages: too few places to cut follow each other")
    stages, stop = [], last
    for index in reversed(range(len(replicas))):
        start = int(before[index][stop])
        stages.append(SearchStage(start, stop, replicas[index]))
        stop = start
    return float(best[last]), tuple(reversed(stages))
