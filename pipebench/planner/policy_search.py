"""The search for a stage's policies: choices for the layers so far, many at once, from the first layer to the last.

What later layers come to depends on few things that were chosen before them (`Sums.consequences`), mostly on what the
last layers do. So there are few different situations at a layer, and of all choices that lead to one of them only those
are followed that none beats in time, memory and copies at once.
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

MOST_LABELS = 2048  # that are followed at once, of a plan's stage: 250 layers of AmoebaNet take a quarter of a second
_MOST_COMPARED = 512  # every one with every other
_FEWEST_BINS = 4  # of memory, where labels are told apart by their consequences, too

_Floats = NDArray[np.float64]
_Indices = NDArray[np.intp]


class _Steps(NamedTuple):
    """What a layer adds to the sums before it.

    Attributes:
        after: [situation, choice] the situation that it leads to.
        added: [situation, choice, 4] as `_Labels.sums`.
        situations: sums that lead to each situation, of which only the consequences matter.
    """

    after: _Indices
    added: _Floats
    situations: list[Sums]


@dataclass(frozen=True)
class _Labels:
    """Choices for the layers so far.

    Attributes:
        problem: the stage.
        situation: [label] what of it later layers depend on.
        sums: [label, 4] seconds and bytes that are computed again, bytes that are kept of a unit and that are swapped.
        origin: [label] where it comes from: the label before the last layer, times the number of choices, plus what
            that layer does.
    """

    problem: StageProblem
    situation: _Indices
    sums: _Floats
    origin: _Indices

    @cached_property
    def extra_s(self) -> _Floats:
        """[label] seconds beyond those of layers."""
        return self.problem.added_s(self.sums[:, 0], self.swapped_bytes)

    @cached_property
    def num_bytes(self) -> _Floats:
        """[label] bytes that these layers keep."""
        return self.problem.most_bytes(self.sums[:, 2], self.swapped_bytes, self.sums[:, 1])

    @property
    def swapped_bytes(self) -> _Floats:
        """[label] bytes that are copied, of a unit."""
        return self.sums[:, 3]

    def __len__(self) -> int:
        return len(self.situation)

    def chosen(self, which: NDArray[np.bool_] | _Indices) -> "_Labels":
        """Return some of them."""
        return _Labels(self.problem, self.situation[which], self.sums[which], self.origin[which])

    def following(self, steps: _Steps) -> "_Labels":
        """Return all of one more layer."""
        sums = (self.sums[:, None, :] + steps.added[self.situation]).reshape(-1, 4)
        return _Labels(self.problem, steps.after[self.situation].ravel(), sums, np.arange(len(sums)))

    def undominated(self) -> "_Labels":
        """Return those that no other in the same situation beats in time, memory and copies at once; of equals one."""
        order = np.lexsort((self.swapped_bytes, self.num_bytes, self.sums[:, 0], self.situation))
        ordered = self.chosen(order)
        worth = np.stack([ordered.sums[:, 0], ordered.num_bytes, ordered.swapped_bytes, ordered.situation])
        beaten = (worth[:3, :, None] <= worth[:3, None, :]).all(axis=0) & (worth[3][:, None] == worth[3])
        return ordered.chosen(~np.triu(beaten, 1).any(axis=0))  # who comes before is no slower

    def coarsened(self, most: int) -> "_Labels":
        """Return the fastest of each situation of those that keep about equally much: no more than so many."""
        situations = np.unique(self.situation)
        num_bins, group = max(1, most // len(situations)), np.searchsorted(situations, self.situation)
        if num_bins < _FEWEST_BINS:
            num_bins, group = most, np.zeros_like(group)
        least, width = self.num_bytes.min(), np.ptp(self.num_bytes)
        # Half a bin less than there are: what keeps most falls into the last one, however floats round.
        bins = ((self.num_bytes - least) * ((num_bins - 0.5) / width if width else 0.0)).astype(np.intp)
        place = group * num_bins + bins
        order = np.lexsort((self.num_bytes, self.extra_s, place))
        return self.chosen(order[np.diff(place[order], prepend=-1) > 0])


def fastest_policies(problem: StageProblem, limit_s: float, most_labels: int) -> tuple[tuple[str, ...] | None, bool]:
    """Return the fastest policies that fit, and whether the search was exact: no others that fit are faster.

    Args:
        problem: the stage.
        limit_s: policies that add more than so many seconds aren't of interest.
        most_labels: choices that are followed at once; the search is exact if there were never more.

    Returns:
        No policies where none were found.
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
    """Return what every layer does, of a label after the last."""
    memory: list[str] = []
    for origin in reversed(origins):
        label, choice = divmod(int(origin[label]), len(problem.choices))
        memory.append(problem.choices[choice])
    return tuple(reversed(memory))


def _steps(problem: StageProblem, layer: int, situations: list[Sums]) -> _Steps:
    """Return what a layer adds in every situation before it; the loss goes with the last layer, and does as it does."""
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
    """Yield what the layers after each keep at least, whatever is done with them; the loss counts as the last one's."""
    on_device = min(problem.in_flight, MOST_ON_DEVICE)
    times = {KEEP: problem.in_flight, SWAP: on_device, RECOMPUTE: 1}  # of what a layer saves: `most_bytes`
    least, own = min(times[policy] for policy in problem.choices), range(problem.start, problem.stop)
    with_loss = problem.own[problem.num_layers :]
    saved = [problem.rows[index].saved_bytes for index in own]
    saved[-1] += sum(problem.rows[index].saved_bytes for index in with_loss)
    later = [0.0, *itertools.accumulate(least * num_bytes for num_bytes in reversed(saved))]
    yield from reversed(later[:-1])
