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
from pipebench.planner.stage_problem import StageOutcome, StageProblem, Sums
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP

_SAME_S = 1e-12  # floats' own rounding: what takes as long as the best that is known is still looked at


def algorithm_2(problem: StageProblem) -> StageOutcome:
    """Return the policies of the paper's listing, and what they come to; perhaps they don't fit.

    Paper: vPipe (TPDS'21) Algorithm 2.
    """
    listing = _Listing.of(problem)
    for count in range(len(listing.ops)):
        if (found := listing.outcome(count)).fits:
            return found
    return listing.outcome(len(listing.ops))


def _near_algorithm_2(problem: StageProblem) -> StageOutcome:
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
        rate = problem.pcie_bytes_per_s  # None: nothing can be swapped
        kept_bytes = [*_kept_alone(problem)]
        forward_s = [problem.rows[problem.start + layer].forward_s for layer in range(problem.num_layers)]
        copy_s = [math.inf if rate is None else num_bytes / rate for num_bytes in kept_bytes]

        def gain(layer: int) -> float:
            cost_s = min(forward_s[layer], copy_s[layer])
            if cost_s:
                return kept_bytes[layer] / cost_s
            return math.inf if kept_bytes[layer] else 0.0

        memory = [KEEP] * problem.num_layers
        ordered = iter(sorted(range(problem.num_layers), key=gain, reverse=True))
        space_bytes = problem.window_s * rate if rate is not None and SWAP in problem.choices else -1.0
        while space_bytes >= 0 and (layer := next(ordered, None)) is not None:
            memory[layer] = SWAP
            space_bytes -= problem.in_flight * kept_bytes[layer]
        ops = [(layer, RECOMPUTE if copy_s[layer] > forward_s[layer] else SWAP) for layer in ordered]
        other = problem.choices[-1]  # what a stage has that lacks one of both
        return cls(problem, memory, [(layer, op if op in problem.choices else other) for layer, op in ops])

    def outcome(self, count: int) -> StageOutcome:
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


def best_policies(problem: StageProblem, most_labels: int = MOST_LABELS) -> StageOutcome:
    """Return the policies that fit and take least time; of those that swap least; of those that keep least.

    Layer by layer, in order, all choices are followed that another with the same consequences for later layers doesn't
    beat in time, memory and copies at once. If they become too many, of those that keep about equally much only the
    fastest is: then the answer may not be the best, and `is_exact` says so.

    Paper: vPipe (TPDS'21) section 4.2. Differs: see above.

    Args:
        problem: the stage.
        most_labels: choices that are followed at once.

    Returns:
        The outcome; if nothing fits, that of what keeps least of a few ways.
    """
    kept = problem.outcome((KEEP,) * problem.num_layers)
    if kept.fits:
        return replace(kept, is_exact=True)
    known = [
        _near_algorithm_2(problem),
        *(problem.outcome((policy,) * problem.num_layers) for policy in problem.choices),
    ]
    limit_s = min((each.extra_s for each in known if each.fits), default=math.inf) + _SAME_S
    memory, is_exact = fastest_policies(problem, limit_s, most_labels)
    found = [] if memory is None else [problem.outcome(memory)]
    fitting = [each for each in (*found, *known) if each.fits]
    if not fitting:
        return min(known, key=lambda each: each.num_bytes)
    best = min(fitting, key=lambda each: (each.extra_s, each.sums.swapped_bytes, each.num_bytes))
    return replace(best, is_exact=is_exact or best.extra_s == 0)  # nothing is faster than no time
