"""The best plan of a mode on a cluster.

Searches (`searches`) propose plans. Under `sosp19` and `artifact` the smallest bottleneck wins, as published. Under
`overlap`, and between modes, the simulator's prediction decides, because bottlenecks ignore flushes and most waiting
for transfers; for pipelines without flushes a local search (`climb`) continues from the proposals.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

from pipebench.errors import PlanError
from pipebench.model.plan import Plan, check_bounds
from pipebench.planner.choices import best_choice, why_nothing_fits
from pipebench.planner.climb import climb, climbs
from pipebench.planner.estimates import LONGEST_BLOCK, MOST_SIMULATED, Estimator
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.flat import SearchStage, renumbered, stages_between
from pipebench.planner.memory import MemoryRule
from pipebench.planner.placements import placements
from pipebench.planner.plans import PlanEstimate, Request, StageTime
from pipebench.planner.predict import arrange, stage_times
from pipebench.planner.searches import Searches
from pipebench.planner.states import PlanningCache
from pipebench.planner.virtualised import best_virtualised, predicted, virtualised
from pipebench.schedule.notation import streams_problem
from pipebench.schedule.placement import places

# Budgets of simulations, in microbatches times stages; 4000 take a quarter of a second.
_MOST_PLACED_UNITS = 4000  # to choose a placement
_MOST_TRIED_UNITS = 1500  # to try plans of other lengths, counting one flush of each
_GLIMPSED = 2000  # instructions simulated to estimate a plan without flushes
_INSTRUCTIONS_OF_A_UNIT = 6
_WORTH_SIMULATING = 0.98  # times the best: an estimate above this is not simulated to steady state
_HOPELESS = 1.5  # times the fastest so far: fill and drain may lengthen the first part of a simulation by half
_ROUNDING = 1e-9  # relative, of bottlenecks
# Required of a placement other than in order, and of cuts by another cost model, because predictions have errors
_CLEARLY_FASTER = 0.99


class Planner(Estimator):
    """Plans one mode.

    Args:
        request: what to plan.
        mode: its name.
        cache: as in `ModeRequest`.
        on_search: called with the name of each search as it begins.

    Attributes:
        search_s: seconds spent in searches so far.
        predict_s: seconds spent in simulations so far.
    """

    def __init__(
        self,
        request: Request,
        mode: str,
        *,
        cache: PlanningCache | None = None,
        on_search: Callable[[str], None] = lambda _search: None,
    ) -> None:
        super().__init__(request, mode, cache)
        self.search_s = self.predict_s = 0.0
        self._on_search = on_search
        self._explains = True  # whether an error says what would fit, which takes longer than the search itself
        self._searches = Searches(self, on_search)

    def best(self) -> PlanEstimate:
        """Return the best plan; raises a PlanError if none fits in memory."""
        if self.stages_choose:
            return self._virtualised()
        return best_choice(self, self._best_of)

    def _best_of(self, request: Request) -> PlanEstimate:
        """Return the best plan of the mode under a request that leaves nothing else open."""
        if request is not self.request:
            other = Planner(request, self.name, cache=self.cache, on_search=self._on_search)
            other._explains = False  # the error for the mode's own row explains
            try:
                return other.best()
            finally:
                self.search_s += other.search_s
                self.predict_s += other.predict_s
                self._searches.coarsened += other._searches.coarsened
        proposed = self.proposed()
        best, started = min(proposed, key=lambda each: each.minibatch_s), time.perf_counter()
        if climbs(self, proposed):
            self._on_search("climbing")
            best = climb(self, proposed)
        self.predict_s += time.perf_counter() - started
        return best

    def _virtualised(self) -> PlanEstimate:
        self._on_search("straight")
        started = time.perf_counter()
        found = best_virtualised(self)
        self.search_s = time.perf_counter() - started
        self._on_search("simulating")
        best = predicted(self, found)
        self.predict_s = time.perf_counter() - started - self.search_s
        return best

    def policies_of(self, replicas: Sequence[int], starts: Sequence[int]) -> tuple[str, ...]:
        """Return the policy of every layer of a given plan: the recipe's, the mode's, or those that its stages choose.

        Raises:
            PlanError: a stage that chooses fits with no policies.
        """
        if not self.stages_choose:
            return self.memory_policies
        found = virtualised(self, self._given_stages(replicas, starts), "the recipe")
        return found.plan.memory

    def proposed(self) -> list[PlanEstimate]:
        """Return the plans that searches propose, with predictions; a single one if bottlenecks decide.

        Raises:
            PlanError: none fits in memory, or none divides the streams of text.
        """
        started = time.perf_counter()
        searches = [self._searches]
        if self._keeping_ties is not None:
            searches.append(Searches(self._keeping_ties, self._on_search))
        found = [each for search in searches for each in search.candidates(self._rule)]
        others = [
            [each for search in searches for each in search.of_other_lengths(self._rule, model)]
            for model in self.cutting_models
        ]
        fitting = [each for each in itertools.chain(found, *others) if self._fits_beyond_noam(each)]
        allowed = [each for each in fitting if streams_problem(each.plan.replicas, self.request.streams) is None]
        stashes = not self.mode.is_one_stage and self.mode.weight_sets != 1
        if not allowed and stashes and self.request.depth is None and self._rule is not None:
            allowed = list(self._searches.shallower(self._rule))
        self.search_s = time.perf_counter() - started
        if not allowed and fitting:
            problem = streams_problem(fitting[0].plan.replicas, self.request.streams)
            raise PlanError(f"no plan of mode {self.name} keeps streams of text together: train.streams is {problem}")
        if not allowed:
            raise PlanError(why_nothing_fits(self) if self._explains else "nothing fits")
        self._on_search("simulating")
        if not self.mode.flush and not self.request.model.has_ports:
            allowed = [min(allowed, key=lambda each: each.bottleneck_s)]
        simulated = _fitting_of(self, allowed, found, others)
        self.predict_s = time.perf_counter() - started - self.search_s
        return simulated

    def at_most(self) -> float:
        """Return an upper bound on the best bottleneck found over the smallest possible; 1 if searches were exact."""
        worst, started = 1.0, time.perf_counter()
        for found_s, bound in self._searches.coarsened:
            self._on_search("bounding what a coarsened search missed")
            bound_s = bound() if found_s > 0 else math.inf
            worst = max(worst, found_s / bound_s if bound_s > 0 else math.inf)
        self.search_s += time.perf_counter() - started
        return worst if worst > 1 + _ROUNDING else 1.0

    def for_replicas(self, replicas: Sequence[int], starts: Sequence[int] | None = None) -> PlanEstimate:
        """Return a plan of given replicas per position, without memory limits.

        `starts` are the first layers of the stages after the first; None: cut as the cost model prefers.

        Raises:
            PlanError: more stages than places to cut, no place to cut before one of `starts`, or a stage that chooses
                its policies and fits with none.
        """
        if self.stages_choose and self.request.memory is None:
            starts = self.starts_of(replicas) if starts is None else starts
            return self.under(memory=self.policies_of(replicas, starts)).for_replicas(replicas, starts)
        return self.with_prediction(self._on_best_devices(self._given_stages(replicas, starts)))

    def estimate_of(self, plan: Plan) -> PlanEstimate:
        """Return a given plan's costs and prediction, without memory limits.

        Raises:
            PlanError: the model can't be cut where the plan is.
        """
        if plan.chunks != self.mode.chunks:
            return self.under(row=replace(self.mode, chunks=plan.chunks), is_cut=True).estimate_of(plan)
        if plan.shard not in (None, self.mode.shard):
            return self.under(row=replace(self.mode, shard=plan.shard)).estimate_of(plan)
        if plan.memory != self.memory_policies:
            return self.under(memory=plan.memory).estimate_of(plan)
        return self.with_prediction(self._estimate_of(plan, "the plan's file"))

    def times_of(self, found: PlanEstimate) -> tuple[StageTime, ...]:
        """Return how the workers of every stage spend simulated time; empty if the plan isn't simulated."""
        return stage_times(*self.keeping(found.plan.memory).workload(found)) if found.is_simulated else ()

    def bottleneck_of(self, plan: Plan) -> float:
        """Return the seconds per minibatch of a plan's slowest stage by the cost model, without simulating it.

        Raises:
            PlanError: the model can't be cut where the plan is.
        """
        return self._estimate_of(plan, "the recipe").bottleneck_s

    def _estimate_of(self, plan: Plan, found_by: str) -> PlanEstimate:
        stages = self._given_stages([stage.replicas for stage in plan.positions], plan.starts)
        return self.estimate(found_by, stages, [stage.devices for stage in plan.stages], depth=plan.depth)

    def starts_of(self, replicas: Sequence[int]) -> list[int]:
        """Return the first layers of all stages but the first, cut best for replicas per position.

        Raises:
            PlanError: more stages than places to cut.
        """
        return arrange(self.work.states, self._given_stages(replicas, None))[1]

    def devices_of(self, replicas: Sequence[int], starts: Sequence[int]) -> tuple[int, ...]:
        """Return the best device of every worker of a given plan."""
        try:
            return self._on_best_devices(self._given_stages(replicas, starts)).plan.devices
        except PlanError:  # the engine can cut there, the cost model can't
            return tuple(range(sum(replicas)))

    def _given_stages(self, widths: Sequence[int], starts: Sequence[int] | None) -> tuple[SearchStage, ...]:
        replicas = [*widths] * self.mode.chunks
        if starts is None and self.mode.shape == "one-stage":
            return tuple(SearchStage(*each, *widths) for each in self.groups)
        states = self.work.states
        if starts is None:
            return self._cut_best(replicas)
        check_bounds([0, *starts, len(states.rows)])
        if not {*starts} <= {*states.after}:
            raise PlanError(f"the model can't be cut before layers {sorted({*starts} - {*states.after})}")
        bounds = [0, *(states.after[start] for start in starts), len(states) - 1]
        return stages_between(bounds, replicas)

    def _cut_best(self, replicas: Sequence[int]) -> tuple[SearchStage, ...]:
        """Return the fastest cuts in the simulator: any, or those that keep tied parameters in one stage.

        The cost models don't charge the sums of tied parameters' copies; the simulator does.
        """
        best = _cut_fastest(self, replicas)
        if self._keeping_ties is None:
            return best
        try:
            stages = _cut_fastest(self._keeping_ties, replicas)
        except PlanError:  # too few places to cut
            return best
        place = {members: i for i, members in enumerate(self.states.members)}
        own = [place[members] for members in self._keeping_ties.states.members]
        whole = renumbered(stages, own)
        best_s, whole_s = (
            self.with_prediction(self.estimate("the recipe", each)).minibatch_s for each in (best, whole)
        )
        return best if best_s < whole_s else whole

    @cached_property
    def _keeping_ties(self) -> Estimator | None:
        """The mode without cuts between layers that share a trained parameter; None if no cut is between such."""
        return self.under(ties=False) if self.work.states.parts_ties else None

    def _on_best_devices(self, stages: Sequence[SearchStage]) -> PlanEstimate:
        """Return the recipe's stages on the best devices.

        Workers stand in order unless another placement is predicted to be clearly faster. The simulator compares the
        placements with the smallest bottlenecks. Bottlenecks decide if simulating takes long or the cost model has no
        ports. Flushing pipelines too large to simulate stay in order, since bottlenecks ignore flushes.
        """
        request, flushes = self.request, self.mode.flush
        chosen = self.mode.chunks == 1 and sum(stage.replicas for stage in stages) <= MOST_SIMULATED
        choices = placements(request.cluster, [stage.replicas for stage in stages]) if chosen else [None]
        in_order, *others = (self.estimate("the recipe", stages, each, depth=request.depth) for each in choices)
        if not others:
            return in_order
        others.sort(key=lambda plan: plan.bottleneck_s)
        if math.lcm(*in_order.plan.replicas) > LONGEST_BLOCK:
            num_simulated = 0
        else:
            units = 3 * self.workload(in_order)[1] * in_order.microbatches * len(in_order.stages)
            num_simulated = int(_MOST_PLACED_UNITS / units)
        if num_simulated >= 2 and (flushes or request.model.has_ports):
            in_order = self.with_prediction(in_order)
            best = min(map(self.with_prediction, others[: num_simulated - 1]), key=lambda plan: plan.minibatch_s)
            return best if best.minibatch_s < _CLEARLY_FASTER * in_order.minibatch_s else in_order
        is_faster = others[0].bottleneck_s < _CLEARLY_FASTER * in_order.bottleneck_s
        return others[0] if is_faster and not flushes else in_order

    @cached_property
    def _rule(self) -> MemoryRule | None:
        limit = self.request.cluster.memory_bytes
        return None if limit is None else self.memory(limit)

    def _fits_beyond_noam(self, found: PlanEstimate) -> bool:
        """Return whether a plan fits in memory.

        Searches have checked it, unless the depth is beyond NOAM or every stage keeps as much as the input stage.
        """
        is_checked = found.plan.depth <= found.plan.noam and not self.weights.as_input_stage
        return is_checked or found.memory_bytes <= self.memory_limit_bytes


def _cut_fastest(estimator: Estimator, replicas: Sequence[int]) -> tuple[SearchStage, ...]:
    """Return the cuts by the first of `cutting_models`, unless those by another are clearly faster."""
    widths = replicas[: len(replicas) // estimator.mode.chunks]
    devices, cluster = places(estimator.mode.order, replicas, estimator.mode.chunks), estimator.request.cluster
    cut = partial(plan_fixed, cluster=cluster.for_stages(len(widths)), replicas=replicas, devices=devices)
    best, *others = (cut(estimator.searched_at(widths), model) for model in estimator.cutting_models)
    for other in others:
        if other != best and _is_better(estimator, other, best):
            best = other
    return best


def _is_better(estimator: Estimator, stages: Sequence[SearchStage], than: Sequence[SearchStage]) -> bool:
    """Return whether a plan along the devices is clearly faster in the simulator, and fits if the other does."""
    found, other = (estimator.estimate("the recipe", each) for each in (stages, than))
    if found.memory_bytes > max(estimator.memory_limit_bytes, other.memory_bytes):
        return False
    return estimator.with_prediction(found).minibatch_s < _CLEARLY_FASTER * estimator.with_prediction(other).minibatch_s


def _fitting_of(
    estimator: Estimator,
    allowed: Sequence[PlanEstimate],
    found: Sequence[PlanEstimate],
    others: Sequence[Sequence[PlanEstimate]],
) -> list[PlanEstimate]:
    """Return `_simulated_of` without the fastest plans that need more than a device's memory in the simulator.

    If no plan is left, the closed form decides: all are returned. Published cost models have the closed form only.
    """
    simulated = fastest = _simulated_of(estimator, allowed, found, others)
    while simulated and estimator.request.model.has_ports:
        by_time = sorted(simulated, key=lambda each: each.minibatch_s)
        overflowing = [each.plan for each in itertools.takewhile(estimator.peaks_over_memory, by_time)]
        if fitting := [each for each in simulated if each.plan not in overflowing]:
            return fitting
        allowed = [each for each in allowed if each.plan not in overflowing]
        simulated = _simulated_of(estimator, allowed, found, others)
    return fastest


def _simulated_of(
    estimator: Estimator,
    allowed: Sequence[PlanEstimate],
    found: Sequence[PlanEstimate],
    others: Sequence[Sequence[PlanEstimate]],
) -> list[PlanEstimate]:
    """Return allowed plans with predictions: those `found`, and of `others` those that are faster.

    `others` has a sequence per cost model of `cutting_models`. As in `_cut_fastest`, plans by another model than the
    request's must be clearly faster.
    """
    tried, later = [each.plan for each in found], [*itertools.chain(*others)]
    simulated = [*_simulated(estimator, [each for each in allowed if each.plan in tried or each not in later])]
    for those, required in zip(others, (1.0, _CLEARLY_FASTER), strict=False):
        best_s = min((each.minibatch_s for each in simulated), default=math.inf)
        simulated += _faster(estimator, [each for each in those if each in allowed], required * best_s, tried)
    return simulated


def _simulated(estimator: Estimator, found: Sequence[PlanEstimate]) -> Iterator[PlanEstimate]:
    """Yield plans with predictions, in order of their bottlenecks, except those far slower than one before.

    A plan that several searches have found is yielded once, as the first search's.
    """
    best_s = math.inf
    seen: list[tuple[Plan, tuple[int, ...]]] = []
    for each in sorted(found, key=lambda each: each.bottleneck_s):
        if (each.plan, each.order) in seen:
            continue
        seen.append((each.plan, each.order))
        simulated = estimator.with_prediction(each, _HOPELESS * best_s)
        if simulated.minibatch_s < math.inf or best_s == math.inf:
            best_s = min(best_s, simulated.minibatch_s)
            yield simulated


def _faster(
    estimator: Estimator, found: Sequence[PlanEstimate], best_s: float, tried: list[Plan]
) -> Iterator[PlanEstimate]:
    """Yield plans faster than `best_s`, simulating the most promising ones until a budget is spent.

    Skips plans that are in `tried`, and adds those that it simulates.
    """
    left = float(_MOST_TRIED_UNITS)
    for each in sorted((each for each in found if each.plan not in tried), key=estimator.filled_s):
        if left <= 0:
            return
        tried.append(each.plan)
        hopeless_s = best_s
        is_simulated = estimator.simulates(each)
        if is_simulated and estimator.mode.flush:  # every flush is like the first
            left -= each.accumulate * math.lcm(*each.plan.replicas) * each.microbatches * len(each.stages)
        elif is_simulated:
            glimpsed_s, taken = estimator.estimate_rate(each, _GLIMPSED)
            left -= taken / _INSTRUCTIONS_OF_A_UNIT
            if glimpsed_s >= _WORTH_SIMULATING * best_s:
                continue
            hopeless_s = _HOPELESS * best_s
        simulated = estimator.with_prediction(each, hopeless_s)
        if simulated.minibatch_s < best_s:
            best_s = simulated.minibatch_s
            yield simulated
