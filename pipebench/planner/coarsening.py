"""Searches of models with very many places to cut: over few of them first, then over all near the best plan's cuts.

The searches' time grows with the square of the number of states, and with its cube on several levels. Beyond MOST_EXACT
they are not exact any more: `refined` looks where the best plan of a coarser choice is cut, again and again, and
`loosened` says how far off that can be. There, neighbouring states are one place to cut that costs no more than any of
them, and whose layers nobody computes: no plan's slowest stage is faster than that of the best over such places.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pipebench.planner.states import States

MOST_EXACT = 2000  # states of a chain; a search over so many takes seconds
_MOST_EXACT_BRANCHES = 1000  # states of which neither may hold the other: bounds prune less there
NUM_GROUPS = 1000  # of neighbouring states in a bound
_COARSE, _BACKDROP, _FINE = 500, 250, 400  # states: at first; later anywhere; later near cuts
_MOST_ROUNDS, _WORTH_A_ROUND = 6, 1e-4

_Plan = TypeVar("_Plan")


def is_coarsened(states: States) -> bool:
    """Return whether searches over these states are not exact."""
    return len(states) > _MOST_EXACT_BRANCHES and (len(states) > MOST_EXACT or not states.is_chain)


def refined(
    states: States,
    solve: Callable[[Sequence[int]], _Plan | None],
    seconds: Callable[[_Plan], float],
    cuts: Callable[[_Plan], Sequence[int]],
) -> _Plan | None:
    """Return the best plan found over fewer states, ever finer around its own cuts; None if none is found.

    Args:
        states: all of them.
        solve: returns the best plan over some of the states, None if there is none.
        seconds: a plan's bottleneck.
        cuts: the states where a plan is cut.
    """
    best = solve(cheapest(states, _COARSE))
    if best is None:  # too little memory for stages of so many layers, perhaps
        best = solve(cheapest(states, MOST_EXACT))
    if best is None:
        return None
    reach = 1.5 * len(states) / _COARSE
    backdrop = cheapest(states, _BACKDROP)
    for _ in range(_MOST_ROUNDS):
        own = cuts(best)
        step = max(1, round(2 * reach * len(own) / _FINE))
        near = [np.arange(cut % step, len(states), step) for cut in own]
        near = [each[abs(each - cut) <= max(reach, step)] for each, cut in zip(near, own, strict=True)]
        found = solve(sorted({*backdrop, *own, *itertools.chain.from_iterable(each.tolist() for each in near)}))
        gain = 0.0 if found is None else 1 - seconds(found) / (seconds(best) or 1.0)
        if found is not None and gain > 0:
            best = found
        if step == 1 and gain < _WORTH_A_ROUND:
            break
        reach = min(reach, max(1.5 * step, _FINE / 2 / max(1, len(own)))) if step > 1 else reach
    return best


def cheapest(states: States, count: int) -> list[int]:
    """Return about `count` states, the one of each group of neighbours where least is sent, the first and the last."""
    carried = states.sent_bytes + states.returned_bytes + states.antichain_bytes
    bounds = _bounds(len(states), count)
    return [a + int(carried[a:b].argmin()) for a, b in itertools.pairwise([*bounds, len(states)])]


def loosened(states: States) -> States:
    """Return groups of neighbouring states as places to cut, over which no bottleneck is larger than over all states.

    A group sends what the member sends that sends least, and a stage between two groups holds the layers between their
    nearest members only. A plan's stages that begin and end in one group have none and are left out.
    """
    return states.grouped(NUM_GROUPS)


def _bounds(num_states: int, count: int) -> list[int]:
    """Return the first states of about `count` groups; the first and the last state are groups of their own."""
    inner = np.linspace(1, num_states - 1, min(count, num_states - 1)).astype(int).tolist()
    return sorted({0, *inner})
