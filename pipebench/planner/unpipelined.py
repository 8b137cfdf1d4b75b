"""Plans for modes without pipelining: stage times add up, and replicas share the minibatches.

W replicas of the input stage admit W minibatches, which pass the stages together. So the seconds per minibatch are the
sum over stages, where a pipeline's are the maximum. The replicas of later stages divide W: more would idle, and an
update covers exactly the W minibatches.

Differs: the cost model prices stages as in a pipeline, so a stage of m replicas is charged a gradient sum per m
minibatches, not per W; and in a run later stages begin before all W minibatches have left the stage before. So the
simulator chooses among the best plans for every W.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from pipebench.planner.activations import Floats
from pipebench.planner.cost_models import StageGrid
from pipebench.planner.flat import FlatProblem, SearchStage

# The time of the search grows with the square of both, to half a second.
MOST_WORKERS = 32
MOST_STATES = 500


def plans_unpipelined(problem: FlatProblem) -> Iterator[tuple[SearchStage, ...]]:
    """Yield the best plan for every number of replicas of the first stage with which one fits.

    Exact: of the plans whose later stages have divisors of that number as replicas, none has a smaller sum of
    `flat.stage_s`. Uses at most `MOST_WORKERS` workers, and ignores `problem.width`.
    """
    count = min(problem.num_workers, MOST_WORKERS)
    seconds = _seconds(problem, count)
    for width in range(1, count + 1):
        found = _plan(seconds, width, count)
        if found is not None:
            yield found


def _seconds(problem: FlatProblem, count: int) -> Floats:
    """Return every stage's seconds per minibatch, [replicas - 1, start, stop]; infinite if impossible."""
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
    """Return the best plan whose first stage has `width` replicas, by dynamic programming from the model's end."""
    _, last, _ = seconds.shape
    later = count - width
    widths = np.array([m for m in range(1, width + 1) if width % m == 0 and m <= later], dtype=int)
    # Workers left after a stage, [replicas, workers]; if there are too few, the index of a row of infinities.
    left = np.arange(later + 1) - widths[:, None]
    left = np.where(left < 0, later + 1, left)
    to_go = np.full((later + 2, last + 1), np.inf)  # [workers, state] seconds from a state to the model's end
    to_go[: later + 1, last] = 0.0

    def choices(state: int) -> Floats:
        """Return the seconds from a state to the end, [replicas of the next stage, workers, its stop]."""
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
