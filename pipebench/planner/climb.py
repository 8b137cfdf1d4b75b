"""Climbing: from the plans that searches found to better ones beside them, the simulator the judge of every step.

Searches weigh a stage by what is known of the stage alone. What several stages do to each other, waits for minibatches
to come back, ports that they share, rounds of different widths that interlock, only the simulator knows. So the search
goes on from the best plans found: a cut is moved, a worker changes stages, two stages merge, one splits, one more
minibatch is in flight, workers change places. Of the plans waiting the one with the smallest floor comes next, times as
far as the plan it comes from is above its own; it is simulated unless its floor is above the best plan's time. Around
those nearly as good as the best the search goes on, until its budget is spent or nothing promising is left.

On the way a plan is only glimpsed: simulated until it repeats itself, at most for so many instructions. The budget
counts those, so that it bounds the time whatever the plans. What wins is simulated as every other plan is, and stands
only if it is better then too.

One minibatch more than NOAM is in flight where that is clearly faster, because transfers are hidden. It costs memory,
which is weighed, and gradients one update staler, which is not.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from pipebench.cluster import RING
from pipebench.errors import PlanError
from pipebench.formats import percent
from pipebench.planner.cost_models import ALONE
from pipebench.planner.estimates import MOST_SIMULATED, Estimator
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.flat import FlatProblem, SearchStage, flat_bound_s
from pipebench.planner.floor import Floors, Sketch
from pipebench.planner.neighbours import along_devices, neighbours
from pipebench.planner.outlines import Outlines
from pipebench.planner.placements import placements
from pipebench.planner.plans import PlanEstimate
from pipebench.planner.predict import FILL_ROUNDS, arranged
from pipebench.schedule.notation import streams_problem
from pipebench.schedule.orders import ONE_F_ONE_B
from pipebench.schedule.pipeline import MOST_BEYOND_NOAM, WHOLE, noam
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.schedule.weights import WEIGHT_POLICIES

BUDGET = 50_000  # instructions simulated, and what takes as long: 15 to 20 microseconds each, so about a second
_GLIMPSED = 4_000  # instructions of one plan
_FINALISTS = 3  # of those glimpsed, simulated until they are steady
_MOST_UNITS = 2_500  # of a plan that may win, minibatches times stages: what simulating it takes until it is steady
_BEAM = 1.05  # times the best: the search goes on around plans up to there
_PLACED = 1.5  # times the best: plans up to there are tried on other devices once nothing else is left to try
_CLEARLY_FASTER = 0.98  # what one more in flight, or a placement, has to win: staler gradients, prediction error
_PRECISION = 1e-3  # relative, of floors and of what is simulated until it repeats itself
_WORTH_A_CHANGE = 1e-3  # relative: below, the plan that was searched for stays
_ALL_SHAPES_UP_TO = 8  # workers; beyond, only shapes of a known form are begun with
_SHAPES_COST = 5_000_000  # of cutting them, stages times the square of the places to cut: an eighth of a second
_ALONE_COST, _OUTLINE_COST, _PLACEMENT_COST = 0.6, 6, 4  # of the budget: what a stage takes alone, an outline, where


def climbs(of: Estimator, found: Sequence[PlanEstimate]) -> bool:
    """Return whether the search goes on from plans found: in pipelines that `floor` knows and that are simulated."""
    mode, policy = of.mode, WEIGHT_POLICIES[of.mode.weights]
    rings = mode.sync == ALL_REDUCE and of.request.cluster.all_reduce == RING
    plain = rings and mode.order == ONE_F_ONE_B and mode.backward == WHOLE and not policy.accumulates
    pipelined = mode.shape == "any" and mode.chunks == 1 and mode.depth is None
    whole = not mode.flush and not mode.microbatches
    return plain and pipelined and whole and of.request.model.has_ports and all(each.is_simulated for each in found)


def climb(of: Estimator, found: Sequence[PlanEstimate]) -> PlanEstimate:
    """Return the best plan around some that searches found, themselves included.

    Args:
        of: what weighs plans.
        found: at least one, simulated.
    """
    before, search = min(found, key=lambda each: each.minibatch_s), _Climb(of)
    best = search.best(found)
    if best.minibatch_s >= (1 - _WORTH_A_CHANGE) * before.minibatch_s:  # equal where no plan takes any time
        best = before
    else:
        gain = percent(before.minibatch_s / best.minibatch_s - 1) if best.minibatch_s > 0 else "all its time"
        best = replace(best, found_by=f"{before.found_by}, improved by {gain}")
    return replace(best, at_least_s=search.at_least_s, tried_all=search.tried_all)


class _Waiting(NamedTuple):
    rank_s: float
    counter: int
    floor_s: float
    sketch: Sketch


class _Climb:
    """One search."""

    def __init__(self, of: Estimator) -> None:
        self._of, self._cluster = of, of.request.cluster
        states = of.work.states
        order = states.layers(0, len(states) - 1)
        policies = [of.memory_policies[layer] for layer in order]
        cost = WEIGHT_POLICIES[of.mode.weights].update_cost
        self._floors = Floors(
            states, arranged(of.sizes, order), self._cluster, of.unit_size, policies, cost, of.request.relay
        )
        self._placements, self._fits = cache(self._listed_placements), cache(self._fits_in_memory)
        self._places = {members.bit_count(): state for state, members in enumerate(states.members)}
        self._found: dict[Sketch, PlanEstimate] = {}
        self._queue: list[_Waiting] = []
        self._known: set[Sketch] = set()
        self._counter = itertools.count()
        self.tried_all = False
        self._best_s, self._left, self._unseen_s = math.inf, float(BUDGET), math.inf

    def best(self, found: Sequence[PlanEstimate]) -> PlanEstimate:
        """Return the best plan around some; one that is as usual unless another is clearly faster."""
        self._found = {self._sketch(each): each for each in found}
        self._best_s = min(each.minibatch_s for each in found)
        begun = [*self._found, *_shapes(self._of)]
        for sketch in begun:
            self._add(sketch, 1.0)
        self._run()
        self.tried_all = self._tries_all()
        if not self.tried_all:
            self._place(begun)
        usual = [sketch for sketch, each in self._found.items() if each.is_simulated or self._is_usual(sketch)]
        plain, fastest = self._simulated(usual), self._simulated([*self._found])
        return fastest if fastest.minibatch_s < _CLEARLY_FASTER * plain.minibatch_s else plain

    @property
    def at_least_s(self) -> float:
        """Seconds per minibatch that no plan takes less than: of those tried where all were, else of any."""
        if self.tried_all:
            return (1 - _PRECISION) * min(self._unseen_s, *(each.minibatch_s for each in self._found.values()))
        fastest = max(self._cluster.levels, key=lambda level: level.sum_bytes_per_s)
        return flat_bound_s(FlatProblem(self._of.work, ALONE, fastest, self._cluster.num_workers))

    def _tries_all(self) -> bool:
        """Try all plans that may be better than the best, if they are few; return whether that was done."""
        last, count = len(self._of.work.states) - 1, self._cluster.num_workers
        # As much budget again: what the climb leaves of its own is for other placements, where plans are many.
        kept, self._left = self._left, BUDGET - _ALONE_COST * last * (last + 1) / 2 * count
        if self._left > 0:
            number, outlines = Outlines(last, count, self._floors.alone_s, self._fits).below(self._best_s)
            self._left -= _OUTLINE_COST * number
            if self._left > 0:
                self._try(outlines)
        is_done = self._left > 0
        self._left = kept
        return is_done

    def _try(self, outlines: Iterable[tuple[SearchStage, ...]]) -> None:
        for floor_s, anywhere in sorted(map(self._anywhere, outlines)):
            if floor_s >= self._best_s or self._left <= 0:
                return
            if not self._may_win(anywhere):
                self._unseen_s = min(self._unseen_s, floor_s)
            for devices in self._placements(anywhere.replicas):
                self._add(anywhere._replace(devices=devices, depth=noam(anywhere.replicas)), 1.0)
            self._run()

    def _anywhere(self, stages: tuple[SearchStage, ...]) -> tuple[float, Sketch]:
        """Return the seconds per minibatch that an outline takes at least, and it, at its largest depth."""
        sketch = Sketch(stages, (), noam([stage.replicas for stage in stages]))
        each = [sketch._replace(depth=depth) for depth in sorted({*self._depths(sketch)})]
        return min(map(self._floors.floor_s, each)), each[-1]

    def _fits_in_memory(self, stage: SearchStage, behind: int) -> bool:
        """Return whether a stage fits at NOAM with so many workers behind it."""
        limit, states = self._cluster.memory_bytes, self._of.work.states
        rule = self._of.memory(limit or math.inf)
        depth = rule.depth(stage.replicas, behind)
        return limit is None or rule.num_bytes(states, stage.start, stage.stop, depth) <= limit

    def _listed_placements(self, replicas: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
        """Return the placements to choose from, see `placements`."""
        found = [tuple(map(tuple, devices)) for devices in placements(self._cluster, replicas)]
        self._left -= _PLACEMENT_COST * len(found)
        return found

    def _place(self, begun: Sequence[Sketch]) -> None:
        """Try plans on other devices: the best ones, then, where workers are few, all that the search began with."""
        placed = set[Sketch]()
        few = self._cluster.num_workers <= _ALL_SHAPES_UP_TO
        while self._run():
            left = [each for each in self._found if each not in placed and self._is_near(each)]
            chosen = sorted(left, key=self._seconds)[:1] or [each for each in begun if few and each not in placed]
            if not chosen:
                return
            placed.update(chosen)
            for sketch in chosen:
                for devices in self._placements(sketch.replicas)[1:]:
                    self._add(sketch._replace(devices=devices), 1.0)

    def _run(self) -> bool:
        """Simulate what waits while there is budget; return whether there is some left."""
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
        """Let a plan wait, at every depth that it may have, if it can be better than the best."""
        if streams_problem(sketch.replicas, self._of.request.streams) is not None:
            return
        for depth in self._depths(sketch):
            each = sketch._replace(depth=depth)
            if each in self._known or self._left <= 0 or not self._may_win(each):
                continue
            self._known.add(each)
            self._left -= self._floor_cost(each)
            floor_s = self._floors.floor_s(each)
            if floor_s < self._best_s or each in self._found:
                heapq.heappush(self._queue, _Waiting(floor_s * excess, next(self._counter), floor_s, each))

    def _estimated_rate(self, sketch: Sketch, floor_s: float) -> PlanEstimate | None:
        """Return about what a plan comes to, or None if it doesn't fit in memory."""
        limit = self._cluster.memory_bytes
        found = self._of.estimate("climbing", sketch.stages, sketch.devices, depth=sketch.depth)
        self._left -= len(self._floors.rows) / 5 + 20
        if limit is not None and found.memory_bytes > limit:
            return None
        minibatch_s, taken = self._of.estimate_rate(found, _GLIMPSED)
        self._left -= taken
        if math.isinf(minibatch_s):
            self._unseen_s = min(self._unseen_s, floor_s)
        self._found[sketch] = replace(found, minibatch_s=minibatch_s)
        return self._found[sketch]

    def _simulated(self, estimated: Sequence[Sketch]) -> PlanEstimate:
        """Return the best plan of some, the most promising of them simulated until they are steady."""
        best = min((each for each in estimated if self._found[each].is_simulated), key=self._seconds)
        for sketch in sorted(estimated, key=self._seconds)[:_FINALISTS]:
            if self._seconds(sketch) < self._seconds(best):
                self._found[sketch] = self._of.with_prediction(self._found[sketch])
                best = min(best, sketch, key=self._seconds)
        return self._found[best]

    def _seconds(self, sketch: Sketch) -> float:
        return self._found[sketch].minibatch_s

    def _is_near(self, sketch: Sketch) -> bool:
        return self._seconds(sketch) <= _PLACED * self._best_s

    def _may_win(self, sketch: Sketch) -> bool:
        """Return whether a plan isn't too long to be simulated until it is steady."""
        rounds = FILL_ROUNDS * max(self._floors.warmups(sketch.replicas, sketch.depth))
        return math.lcm(*sketch.replicas) * rounds * len(sketch.stages) <= _MOST_UNITS

    def _floor_cost(self, sketch: Sketch) -> float:
        stages = len(sketch.stages)
        return (2 * stages + sum(sketch.replicas) + len(self._floors.rows) / (2 * stages)) / 3

    def _depths(self, sketch: Sketch) -> Sequence[int]:
        asked, usual = self._of.request.depth, noam(sketch.replicas)
        if asked is not None or len(sketch.stages) == 1:
            return (asked or 1,)
        return (min(sketch.depth, usual), usual, usual + MOST_BEYOND_NOAM)

    def _is_usual(self, sketch: Sketch) -> bool:
        """Return whether a plan is no deeper than NOAM and stands along the devices."""
        usual = self._of.request.depth or noam(sketch.replicas)
        return sketch.depth <= usual and sketch == along_devices(sketch.stages, sketch.depth)

    def _sketch(self, found: PlanEstimate) -> Sketch:
        stages = (
            SearchStage(self._places[stage.start] if index else 0, self._places[stage.stop], stage.replicas)
            for index, stage in enumerate(found.plan.stages)
        )
        return Sketch(tuple(stages), tuple(stage.devices for stage in found.plan.stages), found.plan.depth)


def _shapes(of: Estimator) -> Iterator[Sketch]:
    """Yield plans to begin with besides those found, cut for the smallest bottleneck: all shapes where they are few."""
    work, cluster = of.work, of.request.cluster
    last = len(work.states) - 1
    left = _SHAPES_COST
    for replicas in dict.fromkeys(_widths(cluster.num_workers)):
        left -= len(replicas) * last**2
        if left < 0:
            return
        if len(replicas) <= last:
            try:
                yield along_devices(plan_fixed(work, of.request.model, cluster, replicas), noam(replicas))
            except PlanError:
                continue


def _widths(num_workers: int) -> Iterator[tuple[int, ...]]:
    """Yield replicas per stage: stages equally wide, two stages, and where workers are few all others."""
    if num_workers > MOST_SIMULATED:
        return
    for width in range(1, num_workers + 1):
        yield from ((width,) * count for count in range(2, num_workers // width + 1))
    yield from ((first, num_workers - first) for first in range(1, num_workers))
    if num_workers <= _ALL_SHAPES_UP_TO:
        for count in range(2, num_workers + 1):
            for ends in itertools.combinations(range(1, num_workers + 1), count):
                yield tuple(b - a for a, b in itertools.pairwise((0, *ends)))
