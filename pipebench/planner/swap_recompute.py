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
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pipebench.planner.stage_problem import Outcome, StageProblem, Sums
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP

# Unfinished choices that are followed, over all layers: a few tenths of a second. Stages of some tens of layers seldom
# have more; of others, those are followed that are spread over memory.
MOST_STEPS = 8000
_FEWEST_LABELS = 24
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


class _Label(NamedTuple):
    """The policies of the layers so far, and what they come to.

    Attributes:
        sums: of those layers.
        num_bytes: that they keep, with what the later ones will at least.
        memory: their policies, the last first: that policy and the rest; empty before the first layer.
    """

    sums: Sums
    num_bytes: float
    memory: Any


def best_policies(problem: StageProblem, most_steps: int = MOST_STEPS) -> Outcome:
    """Return the policies that fit and take least time; of those that swap least; of those that keep least.

    Layer by layer, in order, all choices are followed that another with the same consequences for later layers doesn't
    beat in time, memory and copies at once. If they become too many, some are: then the answer may not be the best, and
    `is_exact` says so. If nothing fits, what keeps least of a few ways is returned.

    Args:
        problem: the stage.
        most_steps: choices that are followed, over all layers.
    """
    kept = problem.outcome((KEEP,) * problem.num_layers)
    if kept.fits:
        return replace(kept, is_exact=True)
    known = [
        _near_algorithm_2(problem),
        *(problem.outcome((policy,) * problem.num_layers) for policy in problem.choices),
    ]
    limit_s = min((each.extra_s for each in known if each.fits), default=math.inf) + _SAME
    most = max(_FEWEST_LABELS, most_steps // problem.num_layers)
    later_bytes = [*_least_bytes_after(problem)]
    labels, is_exact = [_Label(Sums(), 0.0, ())], True
    for index, least_bytes in zip(problem.own, later_bytes, strict=True):
        labels = [*_undominated(_following(problem, labels, index, least_bytes, limit_s))]
        if len(labels) > most:
            labels, is_exact = _spread(labels, most), False
    found = [_finished(problem, label) for label in labels]
    fitting = [each for each in (*found, *known) if each.fits]
    if not fitting:
        return min(known, key=lambda each: each.num_bytes)
    best = min(fitting, key=lambda each: (each.extra_s, each.sums.swapped_bytes, each.num_bytes))
    return replace(best, is_exact=is_exact or best.extra_s == 0)


def _following(
    problem: StageProblem, labels: Iterable[_Label], index: int, least_bytes: float, limit_s: float
) -> Iterator[_Label]:
    """Yield the choices with one more layer that may still fit, and be no slower than what is known."""
    is_loss = index == problem.stop
    for label in labels:
        for policy in (label.memory[0],) if is_loss else problem.choices:
            sums = problem.then(label.sums, index, policy)
            num_bytes = problem.num_bytes(sums) + least_bytes
            if sums.again_s <= limit_s and num_bytes <= problem.limit_bytes and problem.swaps_gain(sums):
                yield _Label(sums, num_bytes, (policy, label.memory))


def _least_bytes_after(problem: StageProblem) -> Iterator[float]:
    """Yield what the layers after each keep at least, whatever is done with them."""
    times = {KEEP: problem.in_flight, SWAP: problem.on_device, RECOMPUTE: 1}  # of what a layer saves: see `num_bytes`
    least = min(times[policy] for policy in problem.choices)
    later = [0.0, *itertools.accumulate(least * problem.rows[index].saved_bytes for index in reversed(problem.own))]
    yield from reversed(later[:-1])


def _undominated(labels: Iterable[_Label]) -> Iterator[_Label]:
    """Yield the choices that no other with the same consequences beats in time, memory and copies at once."""
    alike: dict[Hashable, list[_Label]] = {}
    for label in labels:
        alike.setdefault(label.sums.consequences, []).append(label)
    for group in alike.values():
        group.sort(key=lambda label: (label.num_bytes, label.sums.again_s, label.sums.swapped_bytes))
        front: list[_Label] = []
        for label in group:
            sums = label.sums
            if not any(
                each.sums.again_s <= sums.again_s and each.sums.swapped_bytes <= sums.swapped_bytes for each in front
            ):
                front.append(label)
        yield from front


def _spread(labels: list[_Label], most: int) -> list[_Label]:
    """Return so many of the choices, those that keep least and most among them."""
    labels.sort(key=lambda label: (label.num_bytes, label.sums.again_s))
    return [labels[index * (len(labels) - 1) // (most - 1)] for index in range(most)]


def _finished(problem: StageProblem, label: _Label) -> Outcome:
    """Return the outcome of a choice for all layers; the loss, which has the last one's policy, is none of them."""
    memory: list[str] = []
    rest = label.memory
    while rest:
        memory.append(rest[0])
        rest = rest[1]
    sums = label.sums
    return Outcome(
        problem, tuple(memory[::-1][: problem.num_layers]), problem.num_bytes(sums), problem.extra_s(sums), sums
    )
