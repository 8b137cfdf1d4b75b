"""The searches behind a mode's plans: the shapes it allows, and the best plan of each.

Exact for the cost model up to very many places to cut (`coarsening`): flat plans at every level's links in order along
the devices; the paper's hierarchical plan; the best straight plan; data parallelism; under `overlap` a few given
shapes, cut best.
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
from pipebench.planner.cost_models import StageGrid
from pipebench.planner.estimates import Estimator
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.flat import FlatProblem, SearchStage, bottleneck_s, flat_bound_s, plan_flat
from pipebench.planner.hierarchical import HierarchicalProblem, hierarchical_bound_s, plan_hierarchical
from pipebench.planner.memory import MemoryRule, StraightPlans
from pipebench.planner.plans import PlanEstimate
from pipebench.planner.unpipelined import MOST_STATES, MOST_WORKERS, plans_unpipelined
from pipebench.schedule.placement import places

# Components of one level: the hierarchical tables grow with their number, flat plans do not. 128 take seconds.
MOST_COMPONENTS = 128
MOST_CUTS_OF_SHAPES = 500  # beyond, straight plans and given shapes would take longer than the search for any


def searches_levels(cluster: Cluster) -> bool:
    """Return whether hierarchical plans are searched; flat ones always are."""
    return all(level.count <= MOST_COMPONENTS for level in cluster.levels)


class Searches:
    """The searches of one mode."""

    def __init__(self, of: Estimator, tell: Callable[[str], None]) -> None:
        self._of, self._tell = of, tell
        # Per inexact search, the bottleneck found and a function that bounds it from below
        self.coarsened: list[tuple[float, Callable[[], float]]] = []

    def candidates(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield the plans to choose from; `rule` None for no memory limit."""
        mode, count = self._of.mode, self._of.request.cluster.num_workers
        if mode.shape in ("one", "one-stage"):
            yield from self._one_stage(rule, 1 if mode.shape == "one" else count)
        elif mode.chunks > 1:
            yield from self._interleaved(rule)
        elif mode.shape == "any" and mode.depth == 1:
            yield from self._unpipelined(rule)
        elif mode.shape == "any" and not mode.flush:
            yield from self._one_stage(rule, count)
            yield from self._of_any_width(rule)
        else:
            yield from self._flat_plans(rule, self._equal_widths)

    def _one_stage(self, rule: MemoryRule | None, count: int) -> Iterator[PlanEstimate]:
        of = self._of if not self._of.request.is_cut else self._of.uncut()
        name = "one stage" if len(of.groups) == 1 else f"one stage, in {len(of.groups)} groups of layers"
        plan = of.estimate(name, [SearchStage(*group, count) for group in of.groups])
        if rule is None or plan.memory_bytes <= rule.limit_bytes:
            yield plan

    def _of_any_width(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield flat and hierarchical plans whose stages differ in width, and plans of known shapes."""
        cluster, work, model = self._of.cluster, self._of.work, self._of.request.model
        has_shapes, widths = len(work.states) - 1 <= MOST_CUTS_OF_SHAPES, list[int | None]([None])
        if has_shapes:
            widths.append(1)
        if self._of.request.streams is not None:  # equal widths divide the streams; others may not
            others = (width for width in range(1, cluster.num_workers + 1) if self._of.request.streams % width == 0)
            widths += [width for width in others if width not in widths]
        best_s = math.inf
        for plan in self._flat_plans(rule, widths):
            best_s = min(best_s, plan.bottleneck_s)
            yield plan
        if len(cluster.levels) > 1 and searches_levels(cluster):
            # Plans judged by `loops_s` are not bounded by the recurrence's bottleneck.
            at_most_s = math.inf if model.has_ports else best_s
            problem = HierarchicalProblem(work, model, cluster.levels, rule)
            self._tell("hierarchical")
            nested = plan_hierarchical(problem, at_most_s)
            if nested is not None:
                if is_coarsened(work.states):
                    found_s = min(nested.bottleneck_s, at_most_s)
                    self.coarsened.append((found_s, partial(hierarchical_bound_s, problem)))
                bottleneck_s = None if model.has_ports else nested.bottleneck_s
                yield self._of.estimate("hierarchical", nested.stages, nested.devices, bottleneck_s=bottleneck_s)
        if model.has_ports and has_shapes:
            yield from self._of_known_shapes(rule)

    def _flat_plans(self, rule: MemoryRule | None, widths: Sequence[int | None]) -> Iterator[PlanEstimate]:
        """Yield the best flat plan of each width, None for any, at every level's links."""
        request, cluster = self._of.request, self._of.cluster
        for level in cluster.levels:
            for width in widths:
                shape = {None: "", 1: ", straight"}.get(width, f", stages of {width}")
                name = f"flat{shape}{self._where(level)}"
                limit = rule and self._of.at_width(rule, width)
                work = self._of.work_at_most(width)
                problem = FlatProblem(work, request.model, level, cluster.num_workers, limit, width)
                stages = self._flat(name, problem)
                if stages is not None:
                    yield self._of.estimate(name, stages)

    def _where(self, level: Level) -> str:
        return f", links of level {level.name}" if len(self._of.request.cluster.levels) > 1 else ""

    @property
    def _equal_widths(self) -> list[int]:
        """Allowed replicas per stage of plans with equal widths; without shards, flushing modes of any are straight."""
        count = self._of.request.cluster.num_workers
        shape = self._of.mode.shape
        if shape == "straight" or (shape == "any" and not self._of.mode.is_sharded):
            return [1]
        return [width for width in range(1 + (shape == "even"), count + 1, 1 + (shape == "even")) if count % width == 0]

    def _interleaved(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield plans with several stages per worker, cut best for every number of positions.

        Stages are where the order of work has them. P positions use all workers, then half of them, and so on: fewer
        fill sooner. If the best cuts don't fit in memory, cuts are tried whose
        every stage takes at most its share of a worker's.
        """
        mode, chunks, last = self._of.mode, self._of.mode.chunks, len(self._of.work.states) - 1
        request = self._of.request
        for width in self._equal_widths:
            positions = min(request.cluster.num_workers // width, last // chunks)
            while positions > (mode.shape != "even"):  # two ways, one position is enough
                name = f"{chunks} stages per worker" + (f", stages of {width}" if width > 1 else "")
                self._tell(name)
                for share in (None, rule) if rule is not None else (None,):
                    limit = None if share is None else partial(self._fits_its_share, share, positions)
                    replicas = [width] * positions * chunks
                    devices = places(mode.order, replicas, chunks)
                    try:
                        stages = plan_fixed(
                            self._of.work, request.model, self._of.cluster, replicas, devices=devices, fits=limit
                        )
                    except PlanError:
                        continue
                    found = self._of.estimate(name, stages)
                    if rule is None or found.memory_bytes <= rule.limit_bytes:
                        yield found
                        break
                positions //= 2

    def _fits_its_share(self, rule: MemoryRule, positions: int, grid: StageGrid, index: int) -> NDArray[np.bool_]:
        """Return whether stages, as stage `index`, take at most a worker's memory over its number of stages."""
        in_flight = self._of.interleaved_in_flight(positions)[index]
        shared = replace(rule, limit_bytes=rule.limit_bytes / self._of.mode.chunks, in_flight=in_flight)
        return shared.fits(grid, 1, 0)

    def _unpipelined(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield plans for one minibatch at a time per input-stage replica; on large clusters, known shapes."""
        work, cluster, last = self._of.work, self._of.cluster, len(self._of.work.states) - 1
        yield from self._one_stage(rule, cluster.num_workers)
        for level in cluster.levels if last < MOST_STATES else ():
            where = self._where(level)
            self._tell(f"unpipelined{where}")
            problem = FlatProblem(work, self._of.request.model, level, cluster.num_workers, rule)
            for stages in plans_unpipelined(problem):
                yield self._of.estimate(f"unpipelined, input stage of {stages[0].replicas}{where}", stages)
        if cluster.num_workers > MOST_WORKERS or last >= MOST_STATES:
            yield from self._of_known_shapes(rule)

    def _of_known_shapes(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield plans of shapes common in the papers' tables: nearly all workers first, and two halves.

        The searches price stages one by one; these are often better in the simulator than their bottlenecks suggest.
        """
        work, model, cluster = self._of.work, self._of.request.model, self._of.cluster
        count = cluster.num_workers
        shapes = ((count - 1, 1), (count - 2, 1, 1), (count - 2, 2), (count // 2, count - count // 2))
        for replicas in dict.fromkeys(shape for shape in shapes if min(shape) >= 1 and len(shape) < len(work.states)):
            try:
                stages = plan_fixed(work, model, cluster, replicas)
            except PlanError:
                continue
            if rule is None or rule.fit_all(work.states, stages):
                yield self._of.estimate(f"given shape {'-'.join(map(str, replicas))}", stages)

    def shallower(self, rule: MemoryRule) -> Iterator[PlanEstimate]:
        """Yield straight plans with the largest depth that fits in memory."""
        cluster = self._of.cluster
        deepest = min(cluster.num_workers, len(self._of.work.states) - 1)  # a straight plan has no more stages
        straight = StraightPlans(self._of.work, cluster.num_workers, self._of.memory(math.inf))
        for depth in range(deepest - 1, 0, -1):
            lowered = replace(rule, depth_at_most=depth)
            if not straight.fits(self._of.at_width(lowered, 1)):
                continue
            for level in cluster.levels:
                name = "flat, straight, at a depth that fits"
                work = self._of.work_at(depth)
                problem = FlatProblem(work, self._of.request.model, level, cluster.num_workers, lowered, 1)
                stages = self._flat(name, problem)
                if stages is not None:  # what fits at one level's links fits at every other's
                    yield self._of.estimate(name, stages, depth=depth)
            return

    def _flat(self, name: str, problem: FlatProblem) -> tuple[SearchStage, ...] | None:
        """Run a flat search and record its bound if it is inexact."""
        self._tell(name)
        stages = plan_flat(problem)
        if stages is not None and is_coarsened(problem.work.states):
            self.coarsened.append((bottleneck_s(problem, stages), partial(flat_bound_s, problem)))
        return stages
