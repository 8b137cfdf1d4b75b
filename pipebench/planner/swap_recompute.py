"""Activation policies for one stage: vPipe's Algorithm 2, and an exact search.

Paper: vPipe (TPDS'21) section 4.2, whose listing is garbled in places. As read here, a layer's *op* is recompute if its
copy takes longer than its forward, else swap. Its *gain* is its bytes over the op's cost. In order of gain, layers are
swapped while their copies fit in the stage's window, then get their op until the stage fits; the others keep.

Differs: `algorithm_2` compares the limit with what the stage holds in this package's memory model, not with equation 1.
Plans use `best_policies` instead, because the listing is not optimal in its own model: it swaps even if everything
fits, swaps first what is better recomputed, counts a copy once per unit in flight though each unit has a window, and
ignores what adjacent layers share.

The exact search is dynamic programming over the layers, with all partial choices as arrays. The costs of later layers
depend on little of what was chosen before (`Sums.consequences`), so each layer has few distinct states. Of the partial
choices that reach the same state, those dominated in time, memory and copies are dropped.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipebench.planner.activations import MOST_ON_DEVICE, Floats
from pipebench.planner.stage_problem import StageOutcome, StageProblem, Sums
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP

MOST_LABELS = 2048  # per layer: 250 layers of AmoebaNet take a quarter of a second
_MOST_COMPARED = 512  # pairwise
_FEWEST_BINS = 4  # of memory, per state

_Indices = NDArray[np.intp]


class _Steps(NamedTuple):
    """What one more layer adds."""

    after: _Indices  # [state, choice] resulting state
    added: Floats  # [state, choice, 4] as in `_Labels.sums`
    situations: list[Sums]  # per resulting state, sums that lead to it, of which only the consequences are used


@dataclass(frozen=True)
class _Labels:
    """Partial choices of policies, for the layers so far; one per label."""

    problem: StageProblem
    situation: _Indices  # [label] state, index into `_Steps.situations`
    sums: Floats  # [label, 4] recomputed seconds and bytes, unit bytes, swapped bytes
    origin: _Indices  # [label] label before the last layer times the number of choices, plus that layer's choice

    @cached_property
    def extra_s(self) -> Floats:
        """[label] seconds beyond those of the layers."""
        return self.problem.added_s(self.sums[:, 0], self.swapped_bytes)

    @cached_property
    def num_bytes(self) -> Floats:
        """[label] peak bytes of these layers."""
        return self.problem.most_bytes(self.sums[:, 2], self.swapped_bytes, self.sums[:, 1])

    @property
    def swapped_bytes(self) -> Floats:
        """[label] bytes per unit."""
        return self.sums[:, 3]

    def __len__(self) -> int:
        return len(self.situation)

    def chosen(self, which: NDArray[np.bool_] | _Indices) -> "_Labels":
        """Return some of the labels."""
        return _Labels(self.problem, self.situation[which], self.sums[which], self.origin[which])

    def following(self, steps: _Steps) -> "_Labels":
        """Extend every label by every choice for the next layer."""
        sums = (self.sums[:, None, :] + steps.added[self.situation]).reshape(-1, 4)
        return _Labels(self.problem, steps.after[self.situation].ravel(), sums, np.arange(len(sums)))

    def undominated(self) -> "_Labels":
        """Return the labels that no other of the same state equals or beats in time, memory and copies at once."""
        order = np.lexsort((self.swapped_bytes, self.num_bytes, self.sums[:, 0], self.situation))
        ordered = self.chosen(order)
        worth = np.stack([ordered.sums[:, 0], ordered.num_bytes, ordered.swapped_bytes, ordered.situation])
        beaten = (worth[:3, :, None] <= worth[:3, None, :]).all(axis=0) & (worth[3][:, None] == worth[3])
        return ordered.chosen(~np.triu(beaten, 1).any(axis=0))  # sorted: earlier labels are no slower

    def coarsened(self, most: int) -> "_Labels":
        """Return the fastest label per state and memory bin, at most `most` in all."""
        situations = np.unique(self.situation)
        num_bins, group = max(1, most // len(situations)), np.searchsorted(situations, self.situation)
        if num_bins < _FEWEST_BINS:
            num_bins, group = most, np.zeros_like(group)
        least, width = self.num_bytes.min(), np.ptp(self.num_bytes)
        # Half a bin less than `num_bins`, so that the largest value falls into the last bin despite rounding.
        bins = ((self.num_bytes - least) * ((num_bins - 0.5) / width if width else 0.0)).astype(np.intp)
        place = group * num_bins + bins
        order = np.lexsort((self.num_bytes, self.extra_s, place))
        return self.chosen(order[np.diff(place[order], prepend=-1) > 0])


def fastest_policies(problem: StageProblem, limit_s: float, most_labels: int) -> tuple[tuple[str, ...] | None, bool]:
    """Return the fastest policies that fit, or None; and whether the search was exact.

    Policies that add more than `limit_s` seconds per unit are skipped. More than `most_labels` labels per layer are
    pruned, which makes the search inexact.
    """
    labels = _Labels(problem, np.zeros(1, np.intp), np.zeros((1, 4)), np.zeros(1, np.intp))
    situations, origins, is_exact = [Sums()], [], True
    for layer, later_bytes in zip(range(problem.start, problem.stop), _least_bytes_after(problem), strict=True):
        steps = _steps(problem, layer, situations)
        labels = labels.following(steps)
        fits = labels.num_bytes + later_bytes <= problem.limit_bytes
        labels = labels.chosen(fits & (labels.extra_s <= limit_s) & problem.swaps_gain(labels.swapped_bytes))
        if len(labels) <= _MOST_COMPARED:
            labels = labels.undominated()
        if len(labels) > most_labels:
            labels, is_exact = labels.coarsened(most_labels), False
        origins.append(labels.origin)
        alive, situation = np.unique(labels.situation, return_inverse=True)
        labels, situations = replace(labels, situation=situation), [steps.situations[index] for index in alive]
    if not len(labels):
        return None, is_exact
    best, *_ = np.lexsort((labels.num_bytes, labels.swapped_bytes, labels.extra_s))
    return _policies(problem, origins, int(best)), is_exact


def _policies(problem: StageProblem, origins: list[_Indices], label: int) -> tuple[str, ...]:
    """Return the policies that led to a final label."""
    memory: list[str] = []
    for origin in reversed(origins):
        label, choice = divmod(int(origin[label]), len(problem.choices))
        memory.append(problem.choices[choice])
    return tuple(reversed(memory))


def _steps(problem: StageProblem, layer: int, situations: list[Sums]) -> _Steps:
    """Return what a layer adds in every state; the loss has the last layer's policy."""
    layers = range(layer, layer + 1 + (layer == problem.stop - 1 and problem.stop in problem.own))
    after = np.zeros((len(situations), len(problem.choices)), np.intp)
    added = np.zeros((*after.shape, 4))
    found: dict[object, int] = {}
    made: list[Sums] = []
    for (row, before), (column, policy) in itertools.product(enumerate(situations), enumerate(problem.choices)):
        sums = before
        for each in layers:
            sums = problem.then(sums, each, policy)
        after[row, column] = found.setdefault(sums.consequences, len(made))
        if after[row, column] == len(made):
            made.append(sums)
        added[row, column] = np.subtract(sums[:4], before[:4])
    return _Steps(after, added, made)


def _least_bytes_after(problem: StageProblem) -> Iterator[float]:
    """Yield, per layer, a lower bound of the bytes that later layers keep; the loss counts with the last."""
    on_device = min(problem.in_flight, MOST_ON_DEVICE)
    times = {KEEP: problem.in_flight, SWAP: on_device, RECOMPUTE: 1}  # of what a layer saves: `most_bytes`
    least, own = min(times[policy] for policy in problem.choices), range(problem.start, problem.stop)
    with_loss = problem.own[problem.num_layers :]
    saved = [problem.rows[index].saved_bytes for index in own]
    saved[-1] += sum(problem.rows[index].saved_bytes for index in with_loss)
    later = [0.0, *itertools.accumulate(least * num_bytes for num_bytes in reversed(saved))]
    yield from reversed(later[:-1])


_SAME_S = 1e-12  # for rounding: candidates as fast as the best known are still considered


def algorithm_2(problem: StageProblem) -> StageOutcome:
    """Return the policies of vPipe (TPDS'21) Algorithm 2; they may not fit."""
    listing = _Listing.of(problem)
    for count in range(len(listing.ops)):
        if (found := listing.outcome(count)).fits:
            return found
    return listing.outcome(len(listing.ops))


def _near_algorithm_2(problem: StageProblem) -> StageOutcome:
    """Return Algorithm 2's policies by bisection, which evaluates a stage of hundreds of layers a few times only.

    Assumes that every op lowers memory, which is true unless copies lag.
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
        other = problem.choices[-1]  # in place of an op that is not allowed
        return cls(problem, memory, [(layer, op if op in problem.choices else other) for layer, op in ops])

    def outcome(self, count: int) -> StageOutcome:
        """Return the outcome with the first `count` ops applied."""
        memory = [*self.memory]
        for layer, op in self.ops[:count]:
            memory[layer] = op
        return self.problem.outcome(memory)


def _kept_alone(problem: StageProblem) -> Iterator[int]:
    """Yield the bytes that every layer adds to a unit if all layers keep."""
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
