"""Local search from the plans that searches found, with the simulator as the judge of every step.

Searches price each stage by itself. Stages interact through round trips, shared ports and rounds of different widths,
which only the simulator has. So the search continues from the best plans by single steps: a cut moves, a worker changes
stages, stages merge or split, the depth grows by one, workers change devices.

The queue is in order of a plan's lower bound times its parent's excess, simulated time over lower bound. A plan is
simulated unless its bound exceeds the best time, and the search continues around plans nearly as fast as the best,
until the budget is spent or the queue is empty. A simulation stops at the steady state or after a limited number of
instructions, which the budget counts, so the time of the search is bounded. Where memory is tight, plans nearly as fast
as the best are simulated once more for their peak memory; the budget doesn't count it. The best plans are simulated
again like all other plans, and win only if they are still faster.

A depth of NOAM + 1 hides transfers. It must be clearly faster to be used: predictions include its memory but not the
effect of its staler gradients.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from pipebench.errors import PlanError
from pipebench.formats import percent
from pipebench.planner.cost_models import ALONE
from pipebench.planner.estimates import MOST_SIMULATED, Estimator
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.flat import FlatProblem, SearchStage, flat_bound_s
from pipebench.planner.floor import Floors
from pipebench.planner.neighbours import Outlines, along_devices, neighbours
from pipebench.planner.placement_costs import Sketch
from pipebench.planner.placements import placements
from pipebench.planner.plans import PlanEstimate
from pipebench.planner.predict import FILL_ROUNDS
from pipebench.schedule.notation import streams_problem
from pipebench.schedule.orders import ONE_F_ONE_B
from pipebench.schedule.pipeline import MOST_BEYOND_NOAM, WHOLE, noam
from pipebench.schedule.syncs import ALL_REDUCE, ORDERED
from pipebench.schedule.weights import WEIGHT_POLICIES

BUDGET = 50_000  # simulated instructions or equivalent, 15 to 20 us each: about a second
_ESTIMATED = 4_000  # instructions simulated of one plan, at most
_FINALISTS = 3  # estimated plans that are simulated to steady state
_MOST_UNITS = 2_500  # minibatches times stages to simulate to steady state; a plan that needs more isn't tried
_BEAM = 1.05  # times the best: the search continues around plans up to this
_PLACED = 1.5  # times the best: plans up to this are tried on other devices at the end
_CLEARLY_FASTER = 0.98  # required of a larger depth (staler gradients) or another placement (prediction error)
_PRECISION = 1e-3  # relative, of lower bounds and simulated times
_WORTH_A_CHANGE = 1e-3  # relative gain; below it, the plan of the searches is returned
_ALL_SHAPES_UP_TO = 8  # workers; beyond, only shapes of a known form are initial plans
_SHAPES_COST = 5_000_000  # stages times squared places to cut: an eighth of a second
# Budget charged, in simulated instructions
_ALONE_COST = 0.6  # lower bound of a stage
_OUTLINE_COST = 6
_PLACEMENT_COST = 4


def climbs(estimator: Estimator, found: Sequence[PlanEstimate]) -> bool:
    """Return whether local search applies: to pipelines that `floor` bounds, if all plans found were simulated."""
    mode, policy = estimator.mode, WEIGHT_POLICIES[estimator.mode.weights]
    rings = mode.sync == ALL_REDUCE and (not mode.is_sharded or mode.sums != ORDERED)  # the bounds assume rings
    plain = rings and mode.order == ONE_F_ONE_B and mode.backward == WHOLE and not policy.accumulates
    pipelined = mode.shape == "any" and mode.chunks == 1 and mode.depth is None
    whole = not mode.flush and not mode.microbatches
    simulated = estimator.request.model.has_ports and all(each.is_simulated for each in found)
    return plain and pipelined and whole and simulated


def climb(estimator: Estimator, found: Sequence[PlanEstimate]) -> PlanEstimate:
    """Return the best plan of those found, which are simulated, and of those around them."""
    before, search = min(found, key=lambda each: each.minibatch_s), _Climb(estimator)
    best = search.best(found)
    if best.minibatch_s >= (1 - _WORTH_A_CHANGE) * before.minibatch_s:  # equal if no plan takes any time
        best = before
    else:
        gain = percent(before.minibatch_s / best.minibatch_s - 1) if best.minibatch_s > 0 else "all its time"
        best = replace(best, found_by=f"{before.found_by}, improved by {gain}")
    return replace(best, at_least_s=search.at_least_s, tried_all=search.tried_all)


class _Waiting(NamedTuple):
    """A queued plan; the queue's order is that of the fields."""

    rank_s: float  # lower bound times the parent's excess
    counter: int  # breaks ties
    floor_s: float  # lower bound, seconds per minibatch
    sketch: Sketch


class _Climb:
    """One local search."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._cluster = estimator.cluster
        self._floors = Floors.of(estimator)
        self._limit_bytes = estimator.memory_limit_bytes
        self._rule = estimator.memory(self._limit_bytes)
        self._placements = cache(self._listed_placements)
        self._depth = cache(self._rule.depth)
        self._num_bytes = cache(
            lambda start, stop, m, depth: self._rule.num_bytes(estimator.work.states, start, stop, depth, m)
        )
        self._found: dict[Sketch, PlanEstimate] = {}  # simulated or estimated
        self._queue: list[_Waiting] = []
        self._queued: set[Sketch] = set()  # ever
        self._counter = itertools.count()
        self.tried_all = False
        self._best_s = math.inf  # seconds per minibatch
        self._left = float(BUDGET)
        self._unseen_s = math.inf  # lower bound of plans that could not be simulated

    def best(self, found: Sequence[PlanEstimate]) -> PlanEstimate:
        """Return the best plan around those found; an unusual placement or depth must be clearly faster."""
        self._found = {self._sketch(each): each for each in found}
        self._best_s = min(each.minibatch_s for each in found)
        initial = [*self._found, *_shapes(self._estimator)]
        for sketch in initial:
            self._add(sketch, 1.0)
        self._run()
        self.tried_all = self._tries_all()
        if not self.tried_all:
            self._place(initial)
        usual = [sketch for sketch, each in self._found.items() if each.is_simulated or self._is_usual(sketch)]
        plain, fastest = self._simulated(usual), self._simulated([*self._found])
        return fastest if fastest.minibatch_s < _CLEARLY_FASTER * plain.minibatch_s else plain

    @property
    def at_least_s(self) -> float:
        """Lower bound on seconds per minibatch: of plans up to NOAM + 1 if `tried_all`, else of any plan."""
        if self.tried_all:
            return (1 - _PRECISION) * min(self._unseen_s, *(each.minibatch_s for each in self._found.values()))
        fastest = max(self._estimator.request.cluster.at_best.levels, key=lambda level: level.sum_bytes_per_s)
        work = self._estimator.work
        if self._estimator.mode.is_sharded:  # replicas share an update, which the bound prices as a whole
            work = replace(work, update_s_per_byte=0.0)
        return flat_bound_s(FlatProblem(work, ALONE, fastest, self._cluster.num_workers))

    def _tries_all(self) -> bool:
        """Try all plans that may beat the best if they are few; return whether all were tried."""
        last, count = len(self._estimator.work.states) - 1, self._cluster.num_workers
        # This has a budget of its own; the rest of the first is for `_place`, if there are too many plans.
        before, self._left = self._left, BUDGET - _ALONE_COST * last * (last + 1) / 2 * count
        if self._left > 0:
            number, outlines = Outlines(last, count, self._floors.alone_s, self._fits_in_memory).below(self._best_s)
            self._left -= _OUTLINE_COST * number
            if self._left > 0:
                self._try(outlines)
        is_done = self._left > 0
        self._left = before
        return is_done

    def _try(self, outlines: Iterable[tuple[SearchStage, ...]]) -> None:
        """Simulate plans of these outlines on all placements, by lower bound, until none may beat the best."""
        for floor_s, anywhere in sorted(map(self._anywhere, outlines)):
            if floor_s >= self._best_s or self._left <= 0:
                return
            if not self._is_affordable(anywhere):
                self._unseen_s = min(self._unseen_s, floor_s)
            for devices in self._placements(anywhere.replicas):
                self._add(anywhere._replace(devices=devices, depth=noam(anywhere.replicas)), 1.0)
            self._run()

    def _anywhere(self, stages: tuple[SearchStage, ...]) -> tuple[float, Sketch]:
        """Return the lower bound of an outline over depths and placements, and the outline at its largest depth."""
        sketch = Sketch(stages, (), noam([stage.replicas for stage in stages]))
        each = [sketch._replace(depth=depth) for depth in sorted({*self._depths(sketch)})]
        return min(map(self._floors.floor_s, each)), each[-1]

    def _fits_in_memory(self, stage: SearchStage, behind: int) -> bool:
        """Return whether a stage fits at NOAM with `behind` workers in later stages."""
        if math.isinf(self._limit_bytes):
            return True
        return self._num_bytes(*stage, self._depth(stage.replicas, behind)) <= self._limit_bytes

    def _listed_placements(self, replicas: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
        """Return the candidates of `placements`, charging the budget."""
        found = [tuple(map(tuple, devices)) for devices in placements(self._cluster, replicas)]
        self._left -= _PLACEMENT_COST * len(found)
        return found

    def _place(self, initial: Sequence[Sketch]) -> None:
        """Try other devices for the best plans, then, if workers are few, for all initial ones."""
        placed = set[Sketch]()
        few = self._cluster.num_workers <= _ALL_SHAPES_UP_TO
        while self._run():
            near_s = _PLACED * self._best_s
            left = [each for each in self._found if each not in placed and self._seconds(each) <= near_s]
            chosen = sorted(left, key=self._seconds)[:1] or [each for each in initial if few and each not in placed]
            if not chosen:
                return
            placed.update(chosen)
            for sketch in chosen:
                for devices in self._placements(sketch.replicas)[1:]:
                    self._add(sketch._replace(devices=devices), 1.0)

    def _run(self) -> bool:
        """Simulate queued plans while budget is left; return whether any is left."""
        while self._queue and self._left > 0:
            _, _, floor_s, sketch = heapq.heappop(self._queue)
            if floor_s >= self._best_s and sketch not in self._found:
                continue
            found = self._found.get(sketch) or self._estimated_rate(sketch, floor_s)
            if found is None:
                continue
            self._best_s = min(self._best_s, found.minibatch_s)
            if found.minibatch_s <= _BEAM * self._best_s:
                for other in neighbours(sketch, self._cluster.num_workers):
                    self._add(other, found.minibatch_s / floor_s if floor_s > 0 else 1.0)
        return self._left > 0

    def _add(self, sketch: Sketch, excess: float) -> None:
        """Queue a plan at every allowed depth if it may beat the best; `excess` is its parent's."""
        if streams_problem(sketch.replicas, self._estimator.request.streams) is not None:
            return
        for depth in self._depths(sketch):
            each = sketch._replace(depth=depth)
            if each in self._queued or self._left <= 0 or not self._is_affordable(each):
                continue
            self._queued.add(each)
            self._left -= self._floor_cost(each)
            floor_s = self._floors.floor_s(each)
            if floor_s < self._best_s or each in self._found:
                heapq.heappush(self._queue, _Waiting(floor_s * excess, next(self._counter), floor_s, each))

    def _estimated_rate(self, sketch: Sketch, floor_s: float) -> PlanEstimate | None:
        """Return the plan with its estimated seconds per minibatch, or None if it doesn't fit in memory."""
        found = self._estimator.estimate("climbing", sketch.stages, sketch.devices, depth=sketch.depth)
        self._left -= len(self._floors.rows) / 5 + 20
        if found.memory_bytes > self._limit_bytes:
            return None
        minibatch_s, taken = self._estimator.estimate_rate(found, _ESTIMATED)
        self._left -= taken
        if minibatch_s <= _BEAM * self._best_s and self._estimator.peaks_over_memory(found):
            return None
        if math.isinf(minibatch_s):
            self._unseen_s = min(self._unseen_s, floor_s)
        self._found[sketch] = replace(found, minibatch_s=minibatch_s)
        return self._found[sketch]

    def _simulated(self, estimated: Sequence[Sketch]) -> PlanEstimate:
        """Return the best of some plans after simulating the most promising to steady state."""
        best = min((each for each in estimated if self._found[each].is_simulated), key=self._seconds)
        for sketch in sorted(estimated, key=self._seconds)[:_FINALISTS]:
            if self._seconds(sketch) < self._seconds(best):
                self._found[sketch] = self._estimator.with_prediction(self._found[sketch])
                best = min(best, sketch, key=self._seconds)
        return self._found[best]

    def _seconds(self, sketch: Sketch) -> float:
        return self._found[sketch].minibatch_s

    def _is_affordable(self, sketch: Sketch) -> bool:
        """Return whether simulating the plan to steady state is affordable."""
        rounds = FILL_ROUNDS * max(self._floors.warmups(sketch.replicas, sketch.depth))
        return math.lcm(*sketch.replicas) * rounds * len(sketch.stages) <= _MOST_UNITS

    def _floor_cost(self, sketch: Sketch) -> float:
        """Return the budget that a plan's lower bound is charged."""
        stages = len(sketch.stages)
        return (2 * stages + sum(sketch.replicas) + len(self._floors.rows) / (2 * stages)) / 3

    def _depths(self, sketch: Sketch) -> Sequence[int]:
        """Return the allowed depths of a plan, with repetitions."""
        asked, usual = self._estimator.request.depth, noam(sketch.replicas)
        if asked is not None or len(sketch.stages) == 1:
            return (asked or 1,)
        return (min(sketch.depth, usual), usual, usual + MOST_BEYOND_NOAM)

    def _is_usual(self, sketch: Sketch) -> bool:
        """Return whether a plan is at most NOAM deep and in order along the devices."""
        usual = self._estimator.request.depth or noam(sketch.replicas)
        return sketch.depth <= usual and sketch == along_devices(sketch.stages, sketch.depth)

    def _sketch(self, found: PlanEstimate) -> Sketch:
        after = self._estimator.work.states.after
        stages = (SearchStage(after[stage.start], after[stage.stop], stage.replicas) for stage in found.plan.stages)
        return Sketch(tuple(stages), tuple(stage.devices for stage in found.plan.stages), found.plan.depth)


def _shapes(estimator: Estimator) -> Iterator[Sketch]:
    """Yield initial plans in order along the devices, cut for the smallest bottleneck, until a budget is spent."""
    work, cluster = estimator.work, estimator.cluster
    last = len(work.states) - 1
    left = _SHAPES_COST
    for replicas in dict.fromkeys(_widths(cluster.num_workers)):
        left -= len(replicas) * last**2
        if left < 0:
            return
        if len(replicas) <= last:
            try:
                yield along_devices(plan_fixed(work, estimator.request.model, cluster, replicas), noam(replicas))
            except PlanError:
                continue


def _widths(num_workers: int) -> Iterator[tuple[int, ...]]:
    """Yield replicas per stage: equal widths; two stages; and if there are few workers, all others."""
    if num_workers > MOST_SIMULATED:
        return
    for width in range(1, num_workers + 1):
        yield from ((width,) * count for count in range(2, num_workers // width + 1))
    yield from ((first, num_workers - first) for first in range(1, num_workers))
    if num_workers <= _ALL_SHAPES_UP_TO:
        for count in range(2, num_workers + 1):
            for ends in itertools.combinations(range(1, num_workers + 1), count):
                yield tuple(b - a for a, b in itertools.pairwise((0, *ends)))
