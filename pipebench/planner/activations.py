"""Bytes of activations that a stage holds per unit if each layer has a policy: keep, swap or recompute.

They are not a sum over layers: a tensor saved by two layers counts once, and a run of recomputed layers keeps its
inputs, which depend on where the stage begins. So each tensor is charged to the first layer of the stage that holds it,
for a range of stage starts. The sums of these charges equal `simulate.memory.kept_bytes` exactly.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipebench.profile.model import LayerProfile
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.simulate.memory import first_that_keeps

# Units on the device of a stage that swaps, if copies keep up: one that runs forward or is copied out, one that runs
# backward, one that is copied in.
MOST_ON_DEVICE = 3
_MOST_STARTS = 2000  # stage starts whose sums are cached, in two arrays over layers each

Floats = NDArray[np.float64]
Amounts = TypeVar("Amounts", np.float64, Floats)  # scalars or arrays


def on_device(
    swapped_bytes: Amounts, forward_s: Amounts | float, pcie_bytes_per_s: float | None
) -> tuple[tuple[Amounts, Amounts], tuple[Amounts, Amounts]]:
    """Return the peak device bytes of swapped tensors with d units in flight: the lower of two lines in d.

    Each line is (constant bytes, bytes per unit in flight). In the first, all units stay on the device. In the second,
    three units do and, if a copy out takes longer than a forward, the uncopied rest of each of the d - 1 units. Copies
    at an unknown rate never lag.
    """
    swaps = np.maximum(0.0, swapped_bytes)  # negative if a profile without storages is inconsistent
    left = 0.0 * swaps
    if pcie_bytes_per_s is not None:
        left = np.maximum(left, swapped_bytes - forward_s * pcie_bytes_per_s)
    return (0.0 * swapped_bytes, swapped_bytes), (MOST_ON_DEVICE * swaps - left, left)


def copies_s(swapped_bytes: Amounts, pcie_bytes_per_s: float | None) -> Amounts:
    """Return the seconds to copy one unit to the host and back."""
    return 2 * swapped_bytes / pcie_bytes_per_s if pcie_bytes_per_s else 0.0 * swapped_bytes


class Unit(NamedTuple):
    """Bytes and seconds of stages per unit; arrays are [start, stop]."""

    stays_bytes: Floats  # on the device from the forward to the backward
    swapped_bytes: Floats  # on the host in between
    forward_s: Floats
    window_s: Floats  # seconds of a forward and a backward without recomputation, which copies overlap with
    pcie_bytes_per_s: float | None  # copy rate per direction, both at once; None if unknown

    @property
    def copies_s(self) -> Floats:
        """Seconds to copy to the host and back."""
        return copies_s(self.swapped_bytes, self.pcie_bytes_per_s)

    @property
    def late_s(self) -> Floats:
        """Seconds by which copies exceed their window: vPipe (TPDS'21) equation 2."""
        return np.maximum(0.0, self.copies_s - self.window_s)


@dataclass(frozen=True)
class VirtualMemory:
    """Policies of one stage's layers and what they cost per unit."""

    kept: int  # number of layers
    swapped: int  # number of layers
    recomputed: int  # number of layers
    swapped_bytes: int
    copies_s: float  # of both directions
    window_s: float  # the stage's forward and backward, with which copies overlap
    again_s: float  # seconds of recomputed forwards

    @property
    def waits_s(self) -> float:
        """Seconds by which the copies exceed the window."""
        return max(0.0, self.copies_s - self.window_s)

    @property
    def is_hidden(self) -> bool:
        """Whether all copies fit in the window."""
        return self.copies_s <= self.window_s


class _Hold(NamedTuple):
    """`layer` holds a tensor of `num_bytes` in stages that start in (after, until]."""

    layer: int
    num_bytes: int
    after: int = -1
    until: float = math.inf


class Activations:
    """Activation bytes of all stages of a model.

    Args:
        rows: the layers; the last is the loss, which belongs to the last stage.
        memory: the policy of every layer but the loss, as executed: layers that change buffers are never recomputed.
        pcie_bytes_per_s: copy rate of devices per direction, both at once; None if unknown.
    """

    def __init__(self, rows: Sequence[LayerProfile], memory: Sequence[str], pcie_bytes_per_s: float | None) -> None:
        self._pcie_bytes_per_s = pcie_bytes_per_s
        self._policies = (*memory, memory[-1])
        self._rows = rows
        again, swapped = (
            {i for i, each in enumerate(self._policies) if each == wanted} for wanted in (RECOMPUTE, SWAP)
        )
        self._kept = _Totals(len(rows), _holds(rows, again, set()))
        self._stays = _Totals(len(rows), _holds(rows, again, swapped)) if swapped else self._kept
        forward_s, backward_s = ([getattr(row, name) for row in rows] for name in ("forward_s", "backward_s"))
        self._forward_s = np.concatenate([[0.0], np.cumsum(forward_s)])
        self._window_s = self._forward_s + np.concatenate([[0.0], np.cumsum(backward_s)])

    def of(self, starts: Iterable[int], stops: Iterable[int]) -> Unit:
        """Return the costs of all stages [start, stop); meaningless where stop < start.

        For stages that end with the model, the layer after their last is the number of rows.
        """
        begin, end = [*map(int, starts)], np.array([*map(int, stops)], dtype=np.intp)
        kept, stays = (
            np.stack([totals.from_layer(start)[end] for start in begin]) for totals in (self._kept, self._stays)
        )
        forward_s, window_s = (sums[None, end] - sums[begin, None] for sums in (self._forward_s, self._window_s))
        return Unit(stays, kept - stays, forward_s, window_s, self._pcie_bytes_per_s)

    def virtual(self, start: int, stop: int) -> VirtualMemory:
        """Return the policies and costs of one stage; arguments as in `of`."""
        unit, last = self.of([start], [stop]), len(self._rows) - 1
        kept, swapped, recomputed = map(self._policies[start : min(stop, last)].count, (KEEP, SWAP, RECOMPUTE))
        return VirtualMemory(
            kept,
            swapped,
            recomputed,
            swapped_bytes=int(unit.swapped_bytes[0, 0]),
            copies_s=float(unit.copies_s[0, 0]),
            window_s=float(unit.window_s[0, 0]),
            again_s=sum(self._rows[i].forward_s for i in range(start, stop) if self._policies[i] == RECOMPUTE),
        )


class _Totals:
    """Activation bytes of every stage; `held` has the holders of each tensor, in order of layers."""

    def __init__(self, num_rows: int, held: Iterable[Sequence[_Hold]]) -> None:
        ranges = np.array([each for holds in held for each in _ranges(holds)], dtype=np.intp).reshape(-1, 4)
        self._from, self._to, self._layer, self._bytes = ranges.T
        self._num_rows = num_rows
        self.from_layer = lru_cache(_MOST_STARTS)(self._totals)

    def _totals(self, start: int) -> Floats:
        """Return the bytes of the stages that begin at layer `start`, [stop], the layer after the last."""
        counts = (self._from <= start) & (start <= self._to)
        each = np.bincount(self._layer[counts] + 1, self._bytes[counts], self._num_rows + 1)
        total: Floats = np.cumsum(each)
        return total


def _ranges(holds: Sequence[_Hold]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first start, last start, layer, bytes): stages that start in the range hold the tensor from `layer` on."""
    free: list[tuple[int, float]] = [(0, math.inf)]  # ranges of stage starts without a holder so far
    for layer, num_bytes, after, until in holds:
        left: list[tuple[int, float]] = []
        for first, last in free:
            own_first, own_last = max(first, after + 1), int(min(last, layer, until))
            if own_first > own_last:
                left.append((first, last))
                continue
            yield own_first, own_last, layer, num_bytes
            rest: tuple[tuple[int, float], ...] = ((first, own_first - 1), (own_last + 1, last))
            left += [each for each in rest if each[0] <= each[1]]
        free = left


def _holds(rows: Sequence[LayerProfile], again: set[int], swapped: set[int]) -> Iterable[list[_Hold]]:
    """Return the holders of every tensor that isn't swapped, by the rules of `simulate.memory.kept_bytes`."""
    held: dict[object, list[_Hold]] = defaultdict(list)
    tells_storages, gone, run = any(row.output_storages for row in rows), again | swapped, 0
    for index, row in enumerate(rows):
        if index not in again:
            run = index + 1
        if index in again:
            for number, num_bytes in row.input_storages:
                held[number].append(_Hold(index, num_bytes))
            for source in row.reads:
                # An output of the run itself is held only in stages that begin after it.
                after = -1 if source < run else source
                if not tells_storages:
                    held[run, source].append(_Hold(index, rows[source].output_bytes, after))
                    continue
                copied = rows[source].runs_once  # unless the value comes from another stage, and is a copy already
                for number, num_bytes in rows[source].output_storages:
                    if copied:
                        held[run, number].append(_Hold(index, num_bytes, until=source))
                    held[number].append(_Hold(index, num_bytes, source if copied else after))
        elif tells_storages:
            for number, num_bytes in row.saved_storages if index not in swapped else ():
                held[number].append(_Hold(index, num_bytes))
        elif index not in swapped:
            held[index, "own"].append(_Hold(index, row.saved_bytes))
            for position, (holder, num_bytes) in enumerate(row.saved_with):
                first = first_that_keeps(rows, gone, holder, num_bytes)
                held[index, position].append(_Hold(index, num_bytes, first))
    return held.values()
