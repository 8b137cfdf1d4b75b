"""Policies for a stage's layers: vPipe's Algorithm 2, and a search that finds the best.

Paper: vPipe (TPDS'21) section 4.2. The listing is garbled in places. Read here: a layer's *op* is to recompute it if
its copy takes longer than its forward, else to swap it; its *gain* is the bytes over what that costs. Layers are taken
in the order of their gain: those whose copies fit in the stage's window are swapped, the next ones given their op as
long as memory is short, the rest kept.

Differs: `algorithm_2` asks whether memory is short of what the stage really keeps, not of equation 1. `best_policies`,
which plans use, is a search, for the listing is plainly not the best that its model allows: it swaps though everything
fits, swaps first what is better recomputed (the gain of an op whose copy takes longer than its forward is larger),
counts a copy once for every unit in flight though each has a window of its own, and looks at no layer's neighbours.
"""

import bisect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pipebench.planner.policy_search import MOST_LABELS, fastest_policies
from pipebench.planner.stage_problem import Outcome, StageProblem, Sums
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP

_SAME = 1e-12  # seconds: floats' own rounding


def algorithm_2(problem: StageProblem) -> Outcome:
    """Return the policies of the paper's listing."""
    listing = _Listing.of(problem)
    for count in range(len(listing.ops)):
        if (found := listing.outcome(count)).fits:
            return found
    return listing.outcome(len(listing.ops))


def _near_algorithm_2(problem: StageProblem) -> Outcome:
    """Return what the listing comes to if memory only gets less with every layer that is given its op.

    That is so but where copies come too late; a stage of hundreds of layers is looked at a few times, not hundreds.
    """
    listing = _Listing.of(problem)
    counts = range(len(listing.ops))
    return listing.outcome(bisect.bisect_left(counts, True, key=lambda count: listing.outcome(count).fits))


class _Listing(NamedTuple):
    """The listing as far as it doesn't look at memory.

    Attributes:
        problem: the stage.
        memory: swapped is what fits in the window.
        ops: the other layers, and what becomes of them as long as memory is short, in this order.
    """

    problem: StageProblem
    memory: list[str]
    ops: list[tuple[int, str]]

    @classmethod
    def of(cls, problem: StageProblem) -> "_Listing":
        """Return a stage's."""
        memory = [KEEP] * problem.num_layers
        rate = problem.pcie_bytes_per_s
        keeping = [*_kept_alone(problem)]
        seconds = [problem.rows[problem.start + layer].forward_s for layer in range(problem.num_layers)]
        recomputed = [rate is None or keeping[layer] / rate > seconds[layer] for layer in range(problem.num_layers)]

        def gain(layer: int) -> float:
            cost_s = seconds[layer] if recomputed[layer] or rate is None else keeping[layer] / rate
            return keeping[layer] / cost_s if cost_s else math.inf if keeping[layer] else 0.0

        ordered = iter(sorted(range(problem.num_layers), key=gain, reverse=True))
        space = problem.window_s * rate if rate is not None and SWAP in problem.choices else -1.0
        while space >= 0 and (layer := next(ordered, None)) is not None:
            memory[layer] = SWAP
            space -= problem.in_flight * keeping[layer]
        ops = ((layer, RECOMPUTE if recomputed[layer] else SWAP) for layer in ordered)
        # Not every stage has both.
        return cls(
            problem, memory, [(layer, op if op in problem.choices else problem.choices[-1]) for layer, op in ops]
        )

    def outcome(self, count: int) -> Outcome:
        """Return what it comes to if so many layers are given their op."""
        memory = [*self.memory]
        for layer, op in self.ops[:count]:
            memory[layer] = op
        return self.problem.outcome(memory)


def _kept_alone(problem: StageProblem) -> Iterator[int]:
    """Yield what every layer keeps where all do."""
    sums = Sums()
    for index in problem.own[: problem.num_layers]:
        following = problem.then(sums, index, KEEP)
        yield following.unit_bytes - sums.unit_bytes
        sums = following


def best_policies(problem: StageProblem, most_labels: int = MOST_LABELS) -> Outcome:
    """Return the policies that fit and take least time; of those that swap least; of those that keep least.

    Layer by layer, in order, all choices are followed that another with the same consequences for later layers doesn't
    beat in time, memory and copies at once. If they become too many, of those that keep about equally much only the
    fastest is: then the answer may not be the best, and `is_exact` says so. If nothing fits, what keeps least of a few
    ways is returned.

    Args:
        problem: the stage.
        most_labels: choices that are followed at once.
    """
    kept = problem.outcome((KEEP,) * problem.num_layers)
    if kept.fits:
        return replace(kept, is_exact=True)
    known = [
        _near_algorithm_2(problem),
        *(problem.outcome((policy,) * problem.num_layers) for policy in problem.choices),
    ]
    limit_s = min((each.extra_s for each in known if each.fits), default=math.inf) + _SAME
    memory, is_exact = fastest_policies(problem, limit_s, most_labels)
    found = [] if memory is None else [problem.outcome(memory)]
    fitting = [each for each in (*found, *known) if each.fits]
    if not fitting:
        return min(known, key=lambda each: each.num_bytes)
    best = min(fitting, key=lambda each: (each.extra_s, each.sums.swapped_bytes, each.num_bytes))
    return replace(best, is_exact=is_exact or best.extra_s == 0)
