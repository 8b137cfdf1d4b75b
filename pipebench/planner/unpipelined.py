"""Plans for modes without pipelining: stage times add up, and replicas share the minibatches.

W replicas of the input stage admit W minibatches, which pass the stages together, so a minibatch's share is the sum of
the stages' seconds per minibatch, where a pipeline's is the maximum. Later stages have a divisor of W replicas: more
would idle, and an update covers exactly the W minibatches.

Differs: the cost model prices stages as in a pipeline, so a stage of m replicas sums gradients once per m minibatches,
not per W; and later stages really begin before all W have left the one before. The simulator chooses among the plans,
one per W.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from pipebench.planner.cost_models import StageGrid
from pipebench.planner.flat import FlatProblem, SearchStage
from pipebench.planner.states import Floats

MOST_WORKERS, MOST_STATES = 32, 500  # the searches' time grows with the square of both: half a second


def plans_unpipelined(problem: FlatProblem) -> Iterator[tuple[SearchStage, ...]]:
    """Yield, for every width of the first stage, the plan with the least sum over its stages, if one fits.

    Exact: no plan with that first width, and later widths that divide it, has a smaller sum of `flat.stage_s`. Uses at
    most `MOST_WORKERS`, and ignores `problem.width`.
    """
    count = min(problem.num_workers, MOST_WORKERS)
    seconds = _seconds(problem, count)
    for width in range(1, count + 1):
        found = _plan(seconds, width, count)
        if found is not None:
            yield found


def _seconds(problem: FlatProblem, count: int) -> Floats:
    """Return the seconds per minibatch of every stage [replicas - 1, start, stop], infinite if it does not exist."""
    work, last = problem.work, len(problem.work.states) - 1
    seconds = np.full((count, last, last + 1), np.inf)
    for starts in (np.arange(1), np.arange(1, last)):
        grid = StageGrid(work, starts)
        barred = ~work.states.inside[starts]
        fits = None if problem.memory is None else partial(problem.memory.fits, problem.memory.parts(grid))
        terms = problem.model.terms(grid, problem.level, first=bool(len(starts) and starts[0] == 0))
        for m in range(1, count + 1):
            outside = barred if fits is None else barred | ~fits(m, 0)
            seconds[m - 1, starts] = np.where(outside, np.inf, terms.seconds(float(m)))
    return seconds


def _plan(seconds: Floats, width: int, count: int) -> tuple[SearchStage, ...] | None:
    """Return the best plan with this first width, by dynamic programming from the model's end."""
    _, last, _ = seconds.shape
    later = count - width
    widths = np.array([m for m in range(1, width + 1) if width % m == 0 and m <= later], dtype=int)
    # Workers left after a stage, [replicas, workers]; too few: the row of infinities.
    left = np.arange(later + 1) - widths[:, None]
    left = np.where(left < 0, later + 1, left)
    to_go = np.full((later + 2, last + 1), np.inf)  # [workers, state] seconds from a state to the end
    to_go[: later + 1, last] = 0.0

    def choices(state: int) -> Floats:
        """Return the seconds from a state on by [replicas, workers there are, stop]."""
        return seconds[widths - 1, state, None, state + 1 :] + to_go[left, state + 1 :]

    if len(widths):
        for state in reversed(range(1, last)):
            to_go[: later + 1, state] = choices(state).min(axis=(0, 2))
    first = seconds[width - 1, 0, 1:] + to_go[later, 1:]
    stop = 1 + int(first.argmin())
    if not np.isfinite(first[stop - 1]):
        return None
    stages, state = [SearchStage(0, stop, width)], stop
    while state < last:
        options = choices(state)[:, later]
        row, column = np.unravel_index(int(options.argmin()), options.shape)
        m, stop = int(widths[row]), state + 1 + int(column)
        stages.append(SearchStage(state, stop, m))
        state, later = stop, later - m
    return tuple(stages)
