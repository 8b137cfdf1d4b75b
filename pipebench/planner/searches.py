"""The searches for a mode's plans: the best plan of each shape that the mode allows.

Each is exact for the cost model, up to very many places to cut (`coarsening`):

- flat plans at every level's links, with workers in order along the devices;
- the paper's hierarchical plan;
- the best straight plan, and data parallelism;
- under `overlap`, a few given shapes with the best cuts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.planner.coarsening import is_coarsened
from pipebench.planner.cost_models import CostModel, StageGrid, UnitWork
from pipebench.planner.estimates import Estimator
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.flat import FlatProblem, SearchStage, bottleneck_s, flat_bound_s, plan_flat
from pipebench.planner.hierarchical import HierarchicalProblem, hierarchical_bound_s, plan_hierarchical
from pipebench.planner.memory import MemoryRule, StraightPlans
from pipebench.planner.plans import PlanEstimate
from pipebench.planner.unpipelined import MOST_STATES, MOST_WORKERS, plans_unpipelined
from pipebench.schedule.placement import places

# Components of one level: the time of the hierarchical search grows with them, and 128 take seconds.
MOST_COMPONENTS = 128
_LENGTHS_COST = 5_000_000  # budget of `of_other_lengths`, in stages times squared places to cut: an eighth of a second
_ESTIMATE_COST = 5_000  # of a stage's estimate, in the same unit
MOST_CUTS_OF_SHAPES = 500  # beyond, straight plans and given shapes would take longer than the search for any shape


def searches_levels(cluster: Cluster) -> bool:
    """Return whether hierarchical plans are searched for; flat ones always are."""
    return all(level.count <= MOST_COMPONENTS for level in cluster.levels)


class Searches:
    """The searches of one mode; `on_search` is called with the name of each as it begins."""

    def __init__(self, estimator: Estimator, on_search: Callable[[str], None]) -> None:
        self._estimator, self._on_search = estimator, on_search
        self._request, self._mode, self._cluster = estimator.request, estimator.mode, estimator.cluster
        # Of every inexact search: the bottleneck found, and a function that returns a lower bound
        self.coarsened: list[tuple[float, Callable[[], float]]] = []

    def candidates(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield the plans to choose from that fit under a memory rule; None for no limit."""
        mode, count = self._mode, self._request.cluster.num_workers
        if mode.is_one_stage:
            yield from self._one_stage(rule, 1 if mode.shape == "one" else count)
        elif mode.chunks > 1:
            yield from self._halved(rule)
        elif mode.shape == "any" and mode.depth == 1:
            yield from self._unpipelined(rule)
        elif mode.shape == "any" and not mode.flush:
            yield from self._one_stage(rule, count)
            yield from self._of_any_width(rule)
        else:
            yield from self._flat_plans(rule, self._equal_widths)

    def _one_stage(self, rule: MemoryRule | None, count: int) -> Iterator[PlanEstimate]:
        estimator = self._estimator.under(is_cut=False) if self._request.is_cut else self._estimator
        name = "one stage" if len(estimator.groups) == 1 else f"one stage, in {len(estimator.groups)} groups of layers"
        plan = estimator.estimate(name, [SearchStage(*group, count) for group in estimator.groups])
        if rule is None or plan.memory_bytes <= rule.limit_bytes:
            yield plan

    def _of_any_width(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield flat and hierarchical plans whose stages differ in width, and plans of known shapes."""
        cluster, work, model = self._cluster, self._estimator.work, self._request.model
        has_shapes, widths = len(work.states) - 1 <= MOST_CUTS_OF_SHAPES, list[int | None]([None])
        if has_shapes:
            widths.append(1)
        if self._request.streams is not None:  # equal widths divide the streams; others may not
            others = (width for width in range(1, cluster.num_workers + 1) if self._request.streams % width == 0)
            widths += [width for width in others if width not in widths]
        best_s = math.inf
        for plan in self._flat_plans(rule, widths):
            best_s = min(best_s, plan.bottleneck_s)
            yield plan
        if len(cluster.levels) > 1 and searches_levels(cluster):
            # With ports, `loops_s` prices plans, so a bottleneck found doesn't bound the recurrence.
            at_most_s = math.inf if model.has_ports else best_s
            problem = HierarchicalProblem(work, model, cluster.levels, rule)
            self._on_search("hierarchical")
            nested = plan_hierarchical(problem, at_most_s)
            if nested is not None:
                if is_coarsened(work.states):
                    found_s = min(nested.bottleneck_s, at_most_s)
                    self.coarsened.append((found_s, partial(hierarchical_bound_s, problem)))
                bottleneck_s = None if model.has_ports else nested.bottleneck_s
                yield self._estimator.estimate("hierarchical", nested.stages, nested.devices, bottleneck_s=bottleneck_s)
        if model.has_ports and has_shapes:
            yield from self._of_known_shapes(rule)

    def _flat_plans(self, rule: MemoryRule | None, widths: Sequence[int | None]) -> Iterator[PlanEstimate]:
        """Yield the best flat plan at every level's links for each width, the replicas of all stages; None for any."""
        request, cluster = self._request, self._cluster
        for level in cluster.levels:
            for width in widths:
                shape = {None: "", 1: ", straight"}.get(width, f", stages of {width}")
                name = f"flat{shape}{self._where(level)}"
                limit = rule and self._estimator.at_width(rule, width)
                work = self._estimator.work
                if width is not None:
                    work = self._estimator.searched_at([width] * self._estimator.positions_at(width))
                problem = FlatProblem(work, request.model, level, cluster.num_workers, limit, width)
                stages = self._flat(name, problem)
                if stages is not None:
                    yield self._estimator.estimate(name, stages)

    def _where(self, level: Level) -> str:
        return f", links of level {level.name}" if len(self._request.cluster.levels) > 1 else ""

    @property
    def _equal_widths(self) -> list[int]:
        """Allowed replicas per stage of plans with equal widths; flushing modes without shards have straight plans."""
        count = self._request.cluster.num_workers
        shape = self._mode.shape
        if shape == "straight" or (shape == "any" and not self._mode.is_sharded):
            return [1]
        return [width for width in range(1 + (shape == "even"), count + 1, 1 + (shape == "even")) if count % width == 0]

    def _halved(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield plans with several stages per worker on all workers, on half of them, on a quarter, and so on.

        The order of work says on which worker each stage is. Pipelines of fewer positions fill sooner.
        """
        for width in self._equal_widths:
            most = self._most_positions(width)
            for positions in (most >> times for times in range(most.bit_length())):
                yield from self._cut_equally(self._estimator.work, rule, width, positions, self._request.model)

    def of_other_lengths(self, rule: MemoryRule | None, model: CostModel) -> Iterator[PlanEstimate]:
        """Yield the best plan by `model` for every number of equally wide positions, most first, within a budget.

        Bottlenecks leave out the fill and drain of plans that flush, and fewer stages have fewer units in flight.
        """
        estimator = self._estimator
        if self._mode.depth is not None or not (self._mode.flush or self._mode.shape in ("straight", "equal", "even")):
            return
        left = float(_LENGTHS_COST)
        for width in self._equal_widths:
            for positions in range(self._most_positions(width), 0, -1):
                left -= positions * self._mode.chunks * ((len(estimator.states) - 1) ** 2 + _ESTIMATE_COST)
                if left < 0:
                    return
                work = estimator.work_at(estimator.depth_of([width] * positions))
                yield from self._cut_equally(work, rule, width, positions, model)

    def _most_positions(self, width: int) -> int:
        return min(self._request.cluster.num_workers // width, (len(self._estimator.states) - 1) // self._mode.chunks)

    def _cut_equally(
        self, work: UnitWork, rule: MemoryRule | None, width: int, positions: int, model: CostModel
    ) -> Iterator[PlanEstimate]:
        """Yield the plan of equally wide positions with the best cuts by `model`, if one is found that fits in memory.

        If workers have several stages and the best cuts don't fit, cuts are tried in which every stage takes at most
        its equal share of a worker's memory.
        """
        estimator, chunks = self._estimator, self._mode.chunks
        if chunks > 1 and positions < 2 and self._mode.shape != "even":  # a two-way pipeline may have one position
            return
        replicas, depth = [width] * positions * chunks, estimator.depth_of([width] * positions)
        several = f"{chunks} stages per worker" if chunks > 1 else f"{positions} stages"
        name = several + (f", stages of {width}" if width > 1 else "")
        name += "" if model is self._request.model else ", round trips hidden"
        self._on_search(name)
        for share in (False, True) if chunks > 1 and rule is not None else (rule is not None,):
            fits = partial(self._fits_its_share, replicas, depth) if share else None
            try:
                cut = plan_fixed(
                    work, model, self._cluster, replicas, devices=places(self._mode.order, replicas, chunks), fits=fits
                )
            except PlanError:
                continue
            found = estimator.estimate(name, cut)
            if rule is None or found.memory_bytes <= rule.limit_bytes:
                yield found
                return

    def _fits_its_share(self, replicas: Sequence[int], depth: int, grid: StageGrid, index: int) -> NDArray[np.bool_]:
        """Return whether a grid's stages, as stage `index`, take at most a worker's memory over its stages."""
        estimator = self._estimator
        rule = estimator.stage_rules(estimator.memory_limit_bytes, replicas, depth)[index]
        in_flight = estimator.in_flight(replicas, index, depth)
        shared = replace(rule, limit_bytes=rule.limit_bytes / self._mode.chunks, in_flight=in_flight)
        return shared.fits(shared.parts(grid), replicas[index], 0)

    def _unpipelined(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield plans with one minibatch in flight per input-stage replica; for large problems, of known shapes."""
        work, cluster, last = self._estimator.work, self._cluster, len(self._estimator.work.states) - 1
        yield from self._one_stage(rule, cluster.num_workers)
        for level in cluster.levels if last < MOST_STATES else ():
            where = self._where(level)
            self._on_search(f"unpipelined{where}")
            problem = FlatProblem(work, self._request.model, level, cluster.num_workers, rule)
            for stages in plans_unpipelined(problem):
                yield self._estimator.estimate(f"unpipelined, input stage of {stages[0].replicas}{where}", stages)
        if cluster.num_workers > MOST_WORKERS or last >= MOST_STATES:
            yield from self._of_known_shapes(rule)

    def _of_known_shapes(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield plans of shapes common in the papers' tables: nearly all workers in the first stage, or half of them.

        They are often faster in the simulator than their bottlenecks, which price stages one by one.
        """
        work, model, cluster = self._estimator.work, self._request.model, self._cluster
        count = cluster.num_workers
        shapes = ((count - 1, 1), (count - 2, 1, 1), (count - 2, 2), (count // 2, count - count // 2))
        for replicas in dict.fromkeys(shape for shape in shapes if min(shape) >= 1 and len(shape) < len(work.states)):
            try:
                stages = plan_fixed(work, model, cluster, replicas)
            except PlanError:
                continue
            if rule is None or rule.fit_all(work.states, stages):
                yield self._estimator.estimate(f"given shape {'-'.join(map(str, replicas))}", stages)

    def shallower(self, rule: MemoryRule) -> Iterator[PlanEstimate]:
        """Yield straight plans with the largest depth that fits in memory."""
        cluster = self._cluster
        deepest = min(cluster.num_workers, len(self._estimator.work.states) - 1)  # the most stages of a straight plan
        straight = StraightPlans(self._estimator.work, cluster.num_workers, self._estimator.memory(math.inf))
        for depth in range(deepest - 1, 0, -1):
            lowered = replace(rule, depth_at_most=depth)
            if not straight.fits(self._estimator.at_width(lowered, 1)):
                continue
            for level in cluster.levels:
                name = "flat, straight, at a depth that fits"
                work = self._estimator.work_at(depth)
                problem = FlatProblem(work, self._request.model, level, cluster.num_workers, lowered, 1)
                stages = self._flat(name, problem)
                if stages is not None:  # whether a plan fits doesn't depend on the links
                    yield self._estimator.estimate(name, stages, depth=depth)
            return

    def _flat(self, name: str, problem: FlatProblem) -> tuple[SearchStage, ...] | None:
        """Run a flat search and record its bound if it is inexact."""
        self._on_search(name)
        stages = plan_flat(problem)
        if stages is not None and is_coarsened(problem.work.states):
            self.coarsened.append((bottleneck_s(problem, stages), partial(flat_bound_s, problem)))
        return stages
