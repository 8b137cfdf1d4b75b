"""Searches over models with very many places to cut: first over a few, then over all near the best plan's cuts.

Search time grows with the square of the number of states, on several levels with its cube. So beyond MOST_EXACT states
searches are inexact. A search over `States.grouped` gives a lower bound on the bottleneck, and so bounds the loss: a
group of neighbouring states costs no more than any of its members.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pipebench.planner.states import States

MOST_EXACT = 2000  # states of a chain; a search over so many takes seconds
_MOST_EXACT_BRANCHES = 1000  # states that are not nested: bounds prune less there
NUM_GROUPS = 1000  # of neighbouring states, in a bound
_COARSE = 500  # states of the first round
_BACKDROP = 250  # states of later rounds, from anywhere in the model
_FINE = 400  # states of later rounds near the best plan's cuts
_MOST_ROUNDS = 6
_WORTH_A_ROUND = 1e-4  # relative gain

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

    Args:
        states: all states.
        solve: returns the best plan over some states, given by their indices, or None.
        seconds: returns a plan's bottleneck in seconds per minibatch.
        cuts: returns the indices of the states where a plan is cut.
    """
    best = solve(cheapest(states, _COARSE))
    if best is None:  # stages between so few states may be too large for memory
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
    """Return about `count` states: the first, the last, and the one of each group of neighbours that sends least."""
    carried = states.sent_bytes + states.returned_bytes + states.antichain_bytes
    bounds = _bounds(len(states), count)
    return [a + int(carried[a:b].argmin()) for a, b in itertools.pairwise([*bounds, len(states)])]


def every_nth(num_states: int, step: int) -> list[int]:
    """Return every `step`-th state and the last."""
    return sorted({*range(0, num_states, step), num_states - 1})


def loosened(states: States) -> States:
    """Return groups of states: the smallest bottleneck over these is at most the one over all states."""
    return states.grouped(NUM_GROUPS)


def _bounds(num_states: int, count: int) -> list[int]:
    """Return the first states of about `count` groups; the first and the last state are groups of their own."""
    inner = np.linspace(1, num_states - 1, min(count, num_states - 1)).astype(int).tolist()
    return sorted({0, *inner})
