"""Whether any straight plan fits in memory, however slow: asked again and again, to say what would make one fit."""

from dataclasses import replace

import numpy as np

from pipebench.planner.coarsening import MOST_EXACT, cheapest, is_coarsened
from pipebench.planner.cost_models import StageGrid, UnitWork
from pipebench.planner.memory import MemoryRule


class Straight:
    """The straight plans of a model.

    Args:
        work: the model; of very many places to cut, some are looked at.
        num_workers: workers there are.
        rule: how the mode fills memory.
    """

    def __init__(self, work: UnitWork, num_workers: int, rule: MemoryRule) -> None:
        states = work.states
        self._states = states.select(cheapest(states, MOST_EXACT)) if is_coarsened(states) else states
        self._num_workers = num_workers
        over, starts = replace(work, states=self._states), range(len(self._states) - 1)
        self._parts = [rule.parts(StageGrid(over, np.array([start]), start + 1)) for start in starts]

    def fits(self, rule: MemoryRule) -> bool:
        """Return whether any of them fits by a rule of the same mode, with a limit and with depths of its own."""
        states = self._states
        workers = np.full(len(states), np.inf)  # the fewest from every state to the end of the model
        workers[-1] = 0.0
        for start in reversed(range(len(states) - 1)):
            fits = rule.least(self._parts[start], workers[start + 1 :]) <= 1.0
            if not states.is_chain:
                fits &= states.inside[start, start + 1 :]
            workers[start] = np.where(fits, 1.0 + workers[start + 1 :], np.inf).min()
        return bool(workers[0] <= self._num_workers)
