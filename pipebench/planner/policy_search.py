"""Search for the fastest policies of a stage: dynamic programming over its layers, all partial choices as arrays.

Later costs depend on little of what was chosen before (`Sums.consequences`), so few distinct states exist per layer; of
the partial choices that reach the same state only those not dominated in time, memory and copies are kept.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipebench.planner.activations import MOST_ON_DEVICE
from pipebench.planner.stage_problem import StageProblem, Sums
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP

MOST_LABELS = 2048  # per layer: 250 layers of AmoebaNet take a quarter of a second
_MOST_COMPARED = 512  # pairwise
_FEWEST_BINS = 4  # of memory, per state

_Floats = NDArray[np.float64]
_Indices = NDArray[np.intp]


class _Steps(NamedTuple):
    """What one more layer adds."""

    after: _Indices  # [state, choice] resulting state
    added: _Floats  # [state, choice, 4] as `_Labels.sums`
    situations: list[Sums]  # per state, sums that lead to it; only their consequences matter


@dataclass(frozen=True)
class _Labels:
    """Partial choices, one per label."""

    problem: StageProblem
    situation: _Indices  # [label] state, index into `_Steps.situations`
    sums: _Floats  # [label, 4] recomputed seconds and bytes, unit bytes, swapped bytes
    origin: _Indices  # [label] label before the last layer times the number of choices, plus that layer's choice

    @cached_property
    def extra_s(self) -> _Floats:
        """[label] seconds beyond those of the layers."""
        return self.problem.added_s(self.sums[:, 0], self.swapped_bytes)

    @cached_property
    def num_bytes(self) -> _Floats:
        """[label] peak bytes of these layers."""
        return self.problem.most_bytes(self.sums[:, 2], self.swapped_bytes, self.sums[:, 1])

    @property
    def swapped_bytes(self) -> _Floats:
        """[label] bytes per unit."""
        return self.sums[:, 3]

    def __len__(self) -> int:
        return len(self.situation)

    def chosen(self, which: NDArray[np.bool_] | _Indices) -> "_Labels":
        return _Labels(self.problem, self.situation[which], self.sums[which], self.origin[which])

    def following(self, steps: _Steps) -> "_Labels":
        """Extend every label by every choice for the next layer."""
        sums = (self.sums[:, None, :] + steps.added[self.situation]).reshape(-1, 4)
        return _Labels(self.problem, steps.after[self.situation].ravel(), sums, np.arange(len(sums)))

    def undominated(self) -> "_Labels":
        """Return labels that no other of the same state beats in time, memory and copies at once; of equals one."""
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
        # Half a bin less, so that the largest falls into the last one despite rounding.
        bins = ((self.num_bytes - least) * ((num_bins - 0.5) / width if width else 0.0)).astype(np.intp)
        place = group * num_bins + bins
        order = np.lexsort((self.num_bytes, self.extra_s, place))
        return self.chosen(order[np.diff(place[order], prepend=-1) > 0])


def fastest_policies(problem: StageProblem, limit_s: float, most_labels: int) -> tuple[tuple[str, ...] | None, bool]:
    """Return the fastest policies that fit, or None, and whether the search was exact.

    Policies that add more than `limit_s` are skipped; more than `most_labels` per layer are pruned, which is not exact.
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
    """Return what a layer adds in every state; the loss shares the last layer's policy."""
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
