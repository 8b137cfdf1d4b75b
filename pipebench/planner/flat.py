"""Planner for one level of links, whose cost does not grow with the number of workers.

Given a bound T on the bottleneck, the fewest replicas of a stage have a closed form, and the fewest workers from every
cut to the end of the model are a shortest path over cuts. The smallest T is found by bisection between an infeasible
bound and the best plan's bottleneck. The fewest workers are best because they leave most to earlier stages. Paths start
at the end of the model because a stage's memory depends on the workers behind it.

Exact up to `coarsening.MOST_EXACT` states; beyond, `flat_bound_s` bounds the loss.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipebench.cluster import Level
from pipebench.planner.activations import Floats
from pipebench.planner.coarsening import every_nth, is_coarsened, loosened, refined
from pipebench.planner.cost_models import CostModel, StageGrid, StageTerms, UnitWork
from pipebench.planner.memory import MemoryLine, MemoryRule
from pipebench.planner.states import States

_ANY_S = 1e30  # seconds: no bottleneck is larger
_PRECISION = 1e-12  # relative; beyond it, rounding of floats decides
_NEAR = 1e-5  # relative distance of the bounds from which on the best plan found is likely optimal
_MOST_CACHED_STATES = 1000  # the terms of all stages between so many states take 36 MB
BLOCK_ELEMENTS = 1 << 16  # float64 numbers, of which a few arrays stay in a core's own cache


class SearchStage(NamedTuple):
    """The layers between two states, on some replicas."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True)
class FlatProblem:
    """A planning problem on one level."""

    work: UnitWork
    model: CostModel
    level: Level
    num_workers: int  # the most that a plan may use
    memory: MemoryRule | None = None  # None for no limit
    width: int | None = None  # replicas of every stage; None for any

    def over(self, states: States) -> "FlatProblem":
        """Return the problem over other states."""
        return replace(self, work=replace(self.work, states=states))


def stages_between(bounds: Sequence[int], replicas: Sequence[int]) -> tuple[SearchStage, ...]:
    """Return the stages between successive states, with these replicas."""
    pairs = zip(itertools.pairwise(bounds), replicas, strict=True)
    return tuple(SearchStage(start, stop, m) for (start, stop), m in pairs)


def renumbered(stages: Sequence[SearchStage], chosen: Sequence[int]) -> tuple[SearchStage, ...]:
    """Return stages between `chosen` states of a model, numbered among these, as stages between all states."""
    return tuple(SearchStage(chosen[start], chosen[stop], m) for start, stop, m in stages)


def bottleneck_s(problem: FlatProblem, stages: Sequence[SearchStage]) -> float:
    """Return the seconds per minibatch of a plan's slowest stage."""
    return max(stage_s(problem, stage) for stage in stages)


def stage_s(problem: FlatProblem, stage: SearchStage) -> float:
    """Return a stage's seconds per minibatch, transfers included."""
    grid = StageGrid(problem.work, np.array([stage.start]), stage.stop)
    terms = problem.model.terms(grid, problem.level, first=stage.start == 0)
    return float(terms.seconds(float(stage.replicas)).flat[0])


def plan_flat(problem: FlatProblem) -> tuple[SearchStage, ...] | None:
    """Return the plan with the smallest bottleneck and then the fewest workers; None if none fits in memory."""
    states = problem.work.states
    if not is_coarsened(states):
        return _plan_exactly(problem)

    def solve(chosen: Sequence[int]) -> tuple[SearchStage, ...] | None:
        found = _plan_exactly(problem.over(states.select(chosen)))
        return found and renumbered(found, chosen)

    return refined(states, solve, lambda plan: bottleneck_s(problem, plan), lambda plan: [s.start for s in plan[1:]])


def flat_bound_s(problem: FlatProblem) -> float:
    """Return a lower bound on every plan's bottleneck, in seconds per minibatch, without memory limits."""
    loose = replace(problem.over(loosened(problem.work.states)), memory=None)
    plan = _plan_exactly(loose)
    return bottleneck_s(loose, plan) if plan else 0.0


def _plan_exactly(problem: FlatProblem) -> tuple[SearchStage, ...] | None:
    if problem.memory is not None:  # often the limit has no effect, and a search without it is several times faster
        boundless = _plan_exactly(replace(problem, memory=None))
        if boundless is None or problem.memory.fit_all(problem.work.states, boundless):
            return boundless
    search = _Search(problem)
    best = search.fewest(_ANY_S)
    if best is None:
        return None
    free = search.fewest(0.0)
    if free is not None:  # a bottleneck of 0 s has no infeasible bound below it, which bisection needs
        return free
    best = min([best, *search.guesses()], key=lambda stages: bottleneck_s(problem, stages))
    high, low, step = bottleneck_s(problem, best), None, 1e-3
    while low is None:  # downwards, in growing steps, to an infeasible bound
        middle = high * (1 - step)
        found = search.fewest(middle)
        if found is None:
            low = middle
        else:
            best, high, step = found, min(middle, bottleneck_s(problem, found)), min(0.5, 4 * step)
    just_below = False
    while high - low > 2 * _PRECISION * high:
        # Near the end the best found is likely optimal, so every other step tests a bound just below it.
        just_below = not just_below and high - low < _NEAR * high
        middle = high * (1 - _PRECISION) if just_below else (low + high) / 2
        if not low < middle < high:  # adjacent floats
            break
        found = search.fewest(middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, bottleneck_s(problem, found))
    # The best may be a guess, or a tie lost by rounding, so fewer workers may suffice.
    return search.fewest(high * (1 + _PRECISION)) or best


class _Search:
    """Finds plans whose bottleneck is at most T, for one T after another."""

    def __init__(self, problem: FlatProblem) -> None:
        self.problem = problem
        self.num_states = len(problem.work.states)
        rows = max(1, BLOCK_ELEMENTS // self.num_states)
        bounds = [0, *range(1, self.num_states - 1, rows), self.num_states - 1]  # a block for first stages
        self._blocks = [np.arange(a, b) for a, b in itertools.pairwise(bounds) if a < b]
        self._cache: dict[tuple[int, int], _Stages] = {}  # by the first start and the number of starts

    def fewest(self, limit_s: float) -> tuple[SearchStage, ...] | None:
        """Return the plan with the fewest workers and a bottleneck of at most `limit_s`, or None."""
        problem, last = self.problem, self.num_states - 1
        workers = np.full(self.num_states, np.inf)
        workers[last] = 0
        following = np.zeros(self.num_states, dtype=int)
        replicas = np.zeros(self.num_states)
        for starts in reversed(self._blocks):
            stop_from = int(starts[0]) + 1
            least = None if problem.memory else self._least(StageGrid(problem.work, starts, stop_from), limit_s)
            for position in reversed(range(len(starts))):
                start = int(starts[position])
                own = self._fitting(start, limit_s, workers) if least is None else least[position, position:]
                total = own + workers[start + 1 :]
                offset = int(total.argmin())
                workers[start], following[start], replicas[start] = total[offset], start + 1 + offset, own[offset]
        if not workers[0] <= problem.num_workers:
            return None
        stages, start = [], 0
        while start < last:
            stop = int(following[start])
            stages.append(SearchStage(start, stop, int(replicas[start])))
            start = stop
        return tuple(stages)

    def guesses(self) -> list[tuple[SearchStage, ...]]:
        """Return the best plan over a coarser choice of cuts, if there is one: it shortens the bisection."""
        step = self.num_states // 64
        if step < 2:
            return []
        chosen = every_nth(self.num_states, step)
        coarse = _plan_exactly(self.problem.over(self.problem.work.states.select(chosen)))
        return [] if coarse is None else [renumbered(coarse, chosen)]

    def _least(self, grid: StageGrid, limit_s: float, at_least: Floats | float = 1.0) -> Floats:
        """Return the fewest replicas of a grid's stages, `at_least` or more."""
        width, stages = self.problem.width, self._stages_of(grid)
        if width is None:
            least = stages.terms.least(limit_s, at_least)
        else:
            least = np.where((at_least <= width) & (stages.seconds <= limit_s), float(width), np.inf)
        return least if stages.outside is None else np.where(stages.outside, np.inf, least)

    def _fitting(self, start: int, limit_s: float, workers: Floats) -> Floats:
        """Return the fewest replicas of the stages from one state that are fast enough and fit in memory."""
        memory, num_workers = self.problem.memory, self.problem.num_workers
        assert memory is not None
        grid = StageGrid(self.problem.work, np.array([start]), start + 1)
        at_least = memory.least(self._stages_of(grid).memory, workers[start + 1 :], num_workers)
        least = self._least(grid, limit_s, np.minimum(at_least, 1e9)[None, :])[0]
        return np.where(np.isfinite(at_least), least, np.inf)

    def _stages_of(self, grid: StageGrid) -> "_Stages":
        """Return a grid's stages, cached unless there are too many."""
        key = int(grid.starts[0]), len(grid.starts)
        if key in self._cache:
            return self._cache[key]
        made = _Stages(self.problem, grid)
        if self.num_states <= _MOST_CACHED_STATES:
            self._cache[key] = made
        return made


class _Stages:
    """The stages of a grid: terms, seconds and memory, which do not depend on T; computed on first use."""

    def __init__(self, problem: FlatProblem, grid: StageGrid) -> None:
        self._problem, self._grid = problem, grid

    @cached_property
    def terms(self) -> StageTerms:
        """Their terms."""
        return self._bounds()

    @cached_property
    def seconds(self) -> Floats:
        """Their seconds per minibatch at the problem's width."""
        assert self._problem.width is not None
        return self._bounds().seconds(float(self._problem.width))

    @cached_property
    def memory(self) -> MemoryLine:
        """See `MemoryRule.parts`."""
        assert self._problem.memory is not None
        return self._problem.memory.parts(self._grid)

    @cached_property
    def outside(self) -> NDArray[np.bool_] | None:
        """Whether pairs of states are no stages, [start, stop]; None if all are."""
        states = self._problem.work.states
        return None if states.is_chain else ~states.inside[self._grid.starts, self._grid.stop_from :]

    def _bounds(self) -> StageTerms:
        first = bool(self._grid.starts[0] == 0)
        return self._problem.model.terms(self._grid, self._problem.level, first=first)
