"""Searches over models with very many places to cut: first over a few, then over all near the best plan's cuts.

Search time grows with the square of the number of states, on several levels with its cube, so beyond MOST_EXACT states
searches are inexact. `States.grouped` bounds the loss: each group of neighbouring states costs no more than any member.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pipebench.planner.states import States

MOST_EXACT = 2000  # states of a chain; a search over so many takes seconds
_MOST_EXACT_BRANCHES = 1000  # states that are not nested: bounds prune less there
NUM_GROUPS = 1000  # of neighbouring states in a bound
_COARSE, _BACKDROP, _FINE = 500, 250, 400  # states: at first; later anywhere, and near cuts
_MOST_ROUNDS, _WORTH_A_ROUND = 6, 1e-4

_Plan = TypeVar("_Plan")


def is_coarsened(states: States) -> bool:
    """Return whether searches over these states are inexact."""
    return len(states) > _MOST_EXACT_BRANCHES and (len(states) > MOST_EXACT or not states.is_chain)


def refined(
    states: States,
    solve: Callable[[Sequence[int]], _Plan | None],
    seconds: Callable[[_Plan], float],
    cuts: Callable[[_Plan], Sequence[int]],
) -> _Plan | None:
    """Return the best plan over a subset of states, refined around its own cuts; None if none is found.

    `solve` returns the best plan over given states, `seconds` a plan's bottleneck, `cuts` the states where it is cut.
    """
    best = solve(cheapest(states, _COARSE))
    if best is None:  # perhaps stages of so many layers don't fit in memory
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
    """Return about `count` states: of each group of neighbours the one that sends least, the first and the last."""
    carried = states.sent_bytes + states.returned_bytes + states.antichain_bytes
    bounds = _bounds(len(states), count)
    return [a + int(carried[a:b].argmin()) for a, b in itertools.pairwise([*bounds, len(states)])]


def loosened(states: States) -> States:
    """Return groups of states, over which no bottleneck exceeds the one over all states."""
    return states.grouped(NUM_GROUPS)


def _bounds(num_states: int, count: int) -> list[int]:
    """Return the first states of about `count` groups; the first and the last state are groups of their own."""
    inner = np.linspace(1, num_states - 1, min(count, num_states - 1)).astype(int).tolist()
    return sorted({0, *inner})
