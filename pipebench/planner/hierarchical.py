"""Hierarchical planner: level by level as in the paper, exact for its recurrence up to `coarsening.MOST_EXACT` states.

Paper: PipeDream (SOSP'19) section 3.1. At level k a stage runs on m components of the level below, each with that
level's best plan for the stage's layers: A^k(i..j, m) from T^k(i..j, m), T^k from A^(k-1). A level's table is a matrix
product in the (min, max) semiring; entries that cannot beat a known plan are skipped.

A stage's memory depends on the workers behind it, idle ones included, so there is a table per number of workers behind.
If replicas are sharded, tables count only the replicas inside one innermost component, so plans may be missed.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipebench.cluster import Level
from pipebench.planner.activations import Floats
from pipebench.planner.coarsening import every_nth, is_coarsened, loosened, refined
from pipebench.planner.cost_models import CostModel, Inner, StageGrid, StageTerms, UnitWork
from pipebench.planner.flat import BLOCK_ELEMENTS, SearchStage, renumbered
from pipebench.planner.memory import MemoryRule
from pipebench.planner.states import States

_THREADS = 2
_WORTH_THREADS = 500  # states
_COARSENING = 4  # every fourth state gives an upper bound on the bottleneck, recursively
_FEW_STATES = 96  # with so few, no upper bound is needed


@dataclass(frozen=True)
class HierarchicalProblem:
    """Like `FlatProblem`, with levels of links, innermost first."""

    work: UnitWork
    model: CostModel
    levels: tuple[Level, ...]
    memory: MemoryRule | None = None

    def over(self, states: States) -> "HierarchicalProblem":
        """Return the problem over other states."""
        return replace(self, work=replace(self.work, states=states))


class HierarchicalPlan(NamedTuple):
    """A plan and its bottleneck by the recurrence."""

    bottleneck_s: float  # per minibatch
    stages: tuple[SearchStage, ...]
    devices: tuple[tuple[int, ...], ...]  # of every stage's replicas


def plan_hierarchical(problem: HierarchicalProblem, at_most_s: float = np.inf) -> HierarchicalPlan | None:
    """Return the plan with the smallest bottleneck; None if none fits in memory.

    Plans slower than `at_most_s` seconds per minibatch may be skipped.
    """
    states = problem.work.states
    if not is_coarsened(states):
        return _plan_exactly(problem, at_most_s)

    def solve(chosen: Sequence[int]) -> HierarchicalPlan | None:
        found = _plan_exactly(problem.over(states.select(chosen)), at_most_s)
        return found and found._replace(stages=renumbered(found.stages, chosen))

    return refined(states, solve, lambda plan: plan.bottleneck_s, lambda plan: [s.start for s in plan.stages[1:]])


def hierarchical_bound_s(problem: HierarchicalProblem) -> float:
    """Return a lower bound on every plan's bottleneck, in seconds per minibatch, without memory limits."""
    plan = _plan_exactly(replace(problem.over(loosened(problem.work.states)), memory=None), np.inf)
    return plan.bottleneck_s if plan else 0.0


def _plan_exactly(problem: HierarchicalProblem, at_most_s: float) -> HierarchicalPlan | None:
    if problem.memory is not None:  # as in the flat search
        boundless = _plan_exactly(replace(problem, memory=None), at_most_s)
        if boundless is None or boundless.bottleneck_s > at_most_s:
            return boundless
        workers = math.prod(level.count for level in problem.levels)
        idle = workers - sum(stage.replicas for stage in boundless.stages)  # counted as behind the last stage
        if problem.memory.fit_all(problem.work.states, boundless.stages, idle):
            return boundless
    states = problem.work.states
    if len(states) > _FEW_STATES:
        coarse = _plan_exactly(problem.over(states.select(every_nth(len(states), _COARSENING))), at_most_s)
        at_most_s = min(at_most_s, coarse.bottleneck_s) if coarse else at_most_s
    return _Tables(problem, at_most_s).solve()


class _Choice(NamedTuple):
    """The best plan of a range of layers on the components of one level."""

    seconds: float  # per minibatch
    stages: tuple[tuple[int, int, int, int], ...]  # start, stop, components, components behind it


class _Tables:
    """Seconds per minibatch of every range of layers on one component of each level."""

    def __init__(self, problem: HierarchicalProblem, at_most_s: float) -> None:
        self.problem = problem
        self.num_states = len(problem.work.states)
        self._outside = ~problem.work.states.inside
        self._sizes = [1]  # workers of a component of the level below each level
        for level in problem.levels:
            self._sizes.append(self._sizes[-1] * level.count)
        self._at_most_s = at_most_s * (1 + 1e-9)
        self._tables: dict[tuple[int, int], Floats] = {}
        self._all_s: dict[tuple[int, bool], list[Floats]] = {}

    def solve(self) -> HierarchicalPlan | None:
        """Return the best plan of the whole model on the whole cluster."""
        top, last = len(self.problem.levels) - 1, self.num_states - 1
        choice = self._range(top, 0, last, 0)
        if choice is None:
            return None
        placed = self._placed(top, choice, 0)
        return HierarchicalPlan(choice.seconds, tuple(stage for stage, _ in placed), tuple(own for _, own in placed))

    def _stages_s(self, level: int, m: int, behind: int, after: int, starts: range, *, first: bool) -> Floats:
        """Return the seconds of stages on m components of a level, [start, state].

        Args:
            level: index of the level.
            m: components that a stage runs on.
            behind: components of the level, in the same component of the level above, that later stages run on.
            after: workers behind the component of the level above, per such component.
            starts: first states of the stages.
            first: whether the stages are the first of the pipeline.
        """
        problem = self.problem
        if problem.memory is None and (not first or (level, first) in self._all_s):
            return self._without_limit(level, first=first)[m - 1][starts.start : starts.stop]
        grid = StageGrid(problem.work, np.asarray(starts, dtype=np.intp))
        terms = self._terms(level, grid, self._workers_behind(level, m, behind, after), first=first)
        outside = self._outside[starts.start : starts.stop]
        if level == 0 and problem.memory is not None:
            outside = outside | ~problem.memory.fits(problem.memory.parts(grid), m, behind + after)
        return np.where(outside, np.inf, terms.seconds(float(m)))

    def _terms(self, level: int, grid: StageGrid, workers_behind: int, *, first: bool) -> StageTerms:
        levels, inner = self.problem.levels, None
        if level > 0:
            seconds = self._table(level - 1, workers_behind)[grid.starts, grid.stop_from :]
            inner = Inner(seconds, levels[level - 1].count)
        return self.problem.model.terms(grid, levels[level], first=first, inner=inner)

    def _without_limit(self, level: int, *, first: bool) -> list[Floats]:
        """Return, per number of components from 1, the seconds of all stages [state, state] without memory limits.

        Filled a few rows at a time, which stay in a core's own cache.
        """
        if (level, first) not in self._all_s:
            count, size = self.problem.levels[level].count, self.num_states
            made = [np.full((size, size), np.inf) for _ in range(count)]
            rows = max(1, BLOCK_ELEMENTS // size)
            for start in range(0, size - 1, rows):
                starts = np.arange(start, min(start + rows, size - 1))
                terms = self._terms(level, StageGrid(self.problem.work, starts, start + 1), 0, first=first)
                outside = self._outside[starts, start + 1 :]
                for m, seconds in enumerate(made, start=1):
                    seconds[starts, start + 1 :] = np.where(outside, np.inf, terms.seconds(float(m)))
            self._all_s[level, first] = made
        return self._all_s[level, first]

    def _workers_behind(self, level: int, m: int, behind: int, after: int) -> int:
        if self.problem.memory is None:
            return 0
        return -(-(behind * self._sizes[level] + after) // m)

    def _table(self, level: int, after: int) -> Floats:
        """Return [state, state]: the best seconds of the layers between on one component of `level + 1`."""
        if (level, after) not in self._tables:
            self._tables[level, after] = self._made(level, after)
        return self._tables[level, after]

    def _made(self, level: int, after: int) -> Floats:
        count, limited = self.problem.levels[level].count, self.problem.memory is not None
        # Only the whole model, which `_range` below plans, can run on all components of every level above. Any other
        # range has one component less at some level, so one slower than the bottleneck times the components is useless.
        above = max(each.count for each in self.problem.levels[level + 1 :])
        limit_s = self._at_most_s * self._sizes[-1] / self._sizes[level + 1] * max(1, above - 1) / above
        if not limited:
            self._without_limit(level, first=True)
        everywhere = range(self.num_states)

        def stages_s(m: int, behind: int, first: bool) -> Floats:
            return self._stages_s(level, m, behind, after, everywhere, first=first)

        best = np.full((self.num_states, self.num_states), np.inf)
        rest: dict[int, Floats] = {}  # by number of components: best times of stages that are not the first
        for w in range(1, count + 1):
            np.minimum(best, stages_s(w, 0, True), out=best)
            # Without a memory limit the workers behind a stage don't matter, so `rest` may leave some of its own idle.
            if limited or w == count:
                for m in range(1, w):
                    _product(stages_s(m, w - m, True), rest[w - m], best, limit_s)
            if w < count:
                rest[w] = stages_s(w, 0, False).copy()
                if not limited and w > 1:
                    np.minimum(rest[w], rest[w - 1], out=rest[w])
                for m in range(1, w):
                    _product(stages_s(m, w - m, False), rest[w - m], rest[w], limit_s)
        whole = self._range(level, 0, self.num_states - 1, after)
        best[0, -1] = whole.seconds if whole else np.inf
        return best

    def _range(self, level: int, start: int, stop: int, after: int) -> _Choice | None:
        """Return the best plan of one range of layers on a level's components, by the same recurrence."""
        count, starts = self.problem.levels[level].count, range(start, stop)
        rest: list[Floats] = [np.full(self.num_states, np.inf)]
        rest[0][stop] = 0.0
        taken: list[tuple[np.ndarray, np.ndarray]] = []  # per w: m and next state of each start
        best: tuple[float, int] = (np.inf, 0)
        for w in range(1, count + 1):
            found, m_taken, next_taken = (np.full(self.num_states, v) for v in (np.inf, 0, 0))
            for m in range(1, w + 1):
                first = self._stages_s(level, m, w - m, after, starts[:1], first=True)
                later = self._stages_s(level, m, w - m, after, starts[1:], first=False)
                seconds = np.concatenate([first, later])
                path = np.maximum(seconds, rest[w - m][None, :])
                nearest = path.argmin(1)
                value = path[np.arange(len(starts)), nearest]
                better = value < found[start:stop]
                found[start:stop][better] = value[better]
                m_taken[start:stop][better], next_taken[start:stop][better] = m, nearest[better]
            rest.append(found)
            taken.append((m_taken, next_taken))
            best = min(best, (float(found[start]), w))
        if not np.isfinite(best[0]):
            return None
        stages, w, at = [], best[1], start
        while at < stop:
            m, following = int(taken[w - 1][0][at]), int(taken[w - 1][1][at])
            stages.append((at, following, m, w - m))
            at, w = following, w - m
        return _Choice(best[0], tuple(stages))

    def _placed(self, level: int, choice: _Choice, after: int) -> list[tuple[SearchStage, tuple[int, ...]]]:
        """Return the stages and their replicas' devices, numbered from 0 within one component of the level above."""
        placed: list[tuple[SearchStage, tuple[int, ...]]] = []
        component = 0
        size = self._sizes[level]
        for start, stop, m, behind in choice.stages:
            components = [(component + index) * size for index in range(m)]
            component += m
            if level == 0:
                placed.append((SearchStage(start, stop, m), tuple(components)))
                continue
            workers = self._workers_behind(level, m, behind, after)
            inner = self._range(level - 1, start, stop, workers)
            assert inner is not None
            for stage, own in self._placed(level - 1, inner, workers):
                # Replica q is in component q mod m. So are those of the component's other stages, and minibatches stay
                # inside the component.
                devices = tuple(offset + worker for worker in own for offset in components)
                placed.append((stage._replace(replicas=len(devices)), devices))
        return placed


def _product(first: Floats, rest: Floats, out: Floats, limit_s: float) -> None:
    """Lower out[i, j] to the minimum over k of max(first[i, k], rest[k, j]), where that is at most `limit_s`."""
    size = len(rest)
    usable, reach = first <= limit_s, rest <= limit_s
    top = np.where(usable.any(0), usable.argmax(0), size)  # first i of every k
    end = np.where(reach.any(1), size - reach[:, ::-1].argmax(1), 0)  # last j of every k

    def lower(band: int) -> None:
        """Lower every `_THREADS`-th row; NumPy's loops release the interpreter lock."""
        firsts, outs = first[band::_THREADS], out[band::_THREADS]
        spare = np.empty(outs.size)  # reused: allocation costs more than the arithmetic
        for k in range(1, size - 1):
            i, stop, j = -((band - int(top[k])) // _THREADS), -((band - k) // _THREADS), int(end[k])
            if i < stop and j > k + 1:
                target = outs[i:stop, k + 1 : j]
                path = spare[: target.size].reshape(target.shape)
                np.maximum(firsts[i:stop, k, None], rest[k, None, k + 1 : j], out=path)
                np.minimum(target, path, out=target)

    if size < _WORTH_THREADS:
        for band in range(_THREADS):
            lower(band)
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lower, range(_THREADS)))
