"""Activation policies for one stage: vPipe's Algorithm 2, and an exact search.

Paper: vPipe (TPDS'21) section 4.2, whose listing is garbled in places. As read here, a layer's *op* is recompute if its
copy takes longer than its forward, else swap; its *gain* is bytes over the op's cost. In order of gain, layers are
swapped while their copies fit in the stage's window; the next ones get their op while memory is short; the rest keep.

Differs: `algorithm_2` compares memory with what the stage really keeps, not with equation 1. Plans use `best_policies`
instead, because the listing is not optimal in its own model: it swaps even if everything fits, swaps first what is
better recomputed, counts a copy once per unit in flight though each unit has a window, and ignores adjacent layers.
"""

import bisect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pipebench.planner.policy_search import MOST_LABELS, fastest_policies
from pipebench.planner.stage_problem import StageOutcome, StageProblem, Sums
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP

_SAME_S = 1e-12  # rounding: candidates equal to the best known are still considered


def algorithm_2(problem: StageProblem) -> StageOutcome:
    """Return the policies of vPipe (TPDS'21) Algorithm 2; they may not fit."""
    listing = _Listing.of(problem)
    for count in range(len(listing.ops)):
        if (found := listing.outcome(count)).fits:
            return found
    return listing.outcome(len(listing.ops))


def _near_algorithm_2(problem: StageProblem) -> StageOutcome:
    """Return Algorithm 2's policies by bisection, assuming that memory falls with every op.

    True unless copies lag; evaluates a stage of hundreds of layers a few times only.
    """
    listing = _Listing.of(problem)
    counts = range(len(listing.ops))
    return listing.outcome(bisect.bisect_left(counts, True, key=lambda count: listing.outcome(count).fits))


class _Listing(NamedTuple):
    """The part of Algorithm 2 that does not depend on memory."""

    problem: StageProblem
    memory: list[str]  # policies after swapping what fits in the window
    ops: list[tuple[int, str]]  # (layer, op) of the other layers, in order of gain

    @classmethod
    def of(cls, problem: StageProblem) -> "_Listing":
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
        other = problem.choices[-1]  # if one of both is not allowed
        return cls(problem, memory, [(layer, op if op in problem.choices else other) for layer, op in ops])

    def outcome(self, count: int) -> StageOutcome:
        """Return the outcome with the first `count` ops applied."""
        memory = [*self.memory]
        for layer, op in self.ops[:count]:
            memory[layer] = op
        return self.problem.outcome(memory)


def _kept_alone(problem: StageProblem) -> Iterator[int]:
    """Yield the bytes per layer if all layers keep."""
    sums = Sums()
    for index in problem.own[: problem.num_layers]:
        following = problem.then(sums, index, KEEP)
        yield following.unit_bytes - sums.unit_bytes
        sums = following


def best_policies(problem: StageProblem, most_labels: int = MOST_LABELS) -> StageOutcome:
    """Return the fastest policies that fit; ties go to fewer swapped bytes, then to less memory.

    Paper: vPipe (TPDS'21) section 4.2. Differs: see above. Dynamic programming over layers with dominance pruning;
    exact (`is_exact`) unless more than `most_labels` partial choices remain at a layer. If nothing fits, returns the
    smallest of a few candidates.
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
