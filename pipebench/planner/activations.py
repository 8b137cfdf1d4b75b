"""What stages keep of a unit where their layers do different things with it: keep, recompute and swap.

What a stage keeps isn't a sum over its layers: what two of them save counts once, what a run of recomputed layers reads
counts where the run begins, at the stage's first layer perhaps, and what swaps leaves only if no other layer keeps it.
But a tensor counts at the first layer of the stage that holds it, and which one that is says where the stage begins: so
many bytes for the stages that begin between two layers and hold a third. All stages from one layer on are the sums of
those, to the byte what `simulate.memory.kept_bytes` says of each.
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

# Of units that swap, those on the device if copies keep up: one that runs forward or leaves, one that runs backward,
# one that comes in.
MOST_ON_DEVICE = 3
_MOST_STARTS = 2000  # whose sums are kept: two arrays of as many layers each

Floats = NDArray[np.float64]
Amounts = TypeVar("Amounts", np.float64, Floats)  # of one stage or choice of policies, or of many at once


def on_device(
    swapped_bytes: Amounts, forward_s: Amounts | float, pcie_bytes_per_s: float | None
) -> tuple[tuple[Amounts, Amounts], tuple[Amounts, Amounts]]:
    """Return what is on the device at most of what d units swap: two lines in d, of which the lower one counts.

    All of it, or three units of it where copies keep up. While the pipeline fills, d forwards follow each other; where
    a copy takes longer than a forward, each of those after the first leaves what isn't copied meanwhile.

    Args:
        swapped_bytes: of a unit.
        forward_s: seconds of a forward.
        pcie_bytes_per_s: rate of copies; None: not known, they are taken to keep up.

    Returns:
        Bytes whatever is in flight, and for each unit in flight, of both.
    """
    swaps = np.maximum(0.0, swapped_bytes)  # less where a profile that can't tell storages apart contradicts itself
    left = 0.0 * swaps
    if pcie_bytes_per_s is not None:
        left = np.maximum(left, swapped_bytes - forward_s * pcie_bytes_per_s)
    return (0.0 * swapped_bytes, swapped_bytes), (MOST_ON_DEVICE * swaps - left, left)


def copies_s(swapped_bytes: Amounts, pcie_bytes_per_s: float | None) -> Amounts:
    """Return the seconds of a unit's copies, to the host and back."""
    return 2 * swapped_bytes / pcie_bytes_per_s if pcie_bytes_per_s else 0.0 * swapped_bytes


class Unit(NamedTuple):
    """What stages come to per unit, [start, stop].

    Attributes:
        stays_bytes: kept from a forward to its backward, on the device.
        swapped_bytes: kept besides, on the host in between.
        forward_s: seconds of a forward.
        window_s: seconds of a forward and a backward, nothing computed again: copies are hidden in them.
    """

    stays_bytes: Floats
    swapped_bytes: Floats
    forward_s: Floats
    window_s: Floats


@dataclass(frozen=True)
class VirtualMemory:
    """What becomes of a stage's activations, per unit.

    Attributes:
        kept, swapped, recomputed: layers whose policy that is.
        swapped_bytes: copied to the host and back.
        copies_s: seconds that this takes, both ways.
        window_s: seconds of the stage's own forward and backward, in which copies are hidden.
        again_s: seconds of forwards that are computed again.
    """

    kept: int
    swapped: int
    recomputed: int
    swapped_bytes: int
    copies_s: float
    window_s: float
    again_s: float

    @property
    def waits_s(self) -> float:
        """The seconds that copies take longer than the window."""
        return max(0.0, self.copies_s - self.window_s)

    @property
    def is_hidden(self) -> bool:
        """Whether all copies fit in the window."""
        return self.copies_s <= self.window_s


class _Hold(NamedTuple):
    """A layer holds so many bytes, in stages that begin after a layer and not after another."""

    layer: int
    num_bytes: int
    after: int = -1
    until: float = math.inf


class Activations:
    """What the stages of a model keep of a unit.

    Args:
        rows: the layers; the last is the loss, which goes with the last layer.
        memory: policy of every layer but the loss, as they run: none that changes a buffer is recomputed.
        pcie_bytes_per_s: rate of copies to the host and, at the same time, back; None: not known.
    """

    def __init__(self, rows: Sequence[LayerProfile], memory: Sequence[str], pcie_bytes_per_s: float | None) -> None:
        self.pcie_bytes_per_s = pcie_bytes_per_s
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
        """Return what stages come to; nonsense where a stop is before its start.

        Args:
            starts: the first layers of stages.
            stops: the layers after their last ones; beyond the loss for those that end with the model.
        """
        begin, end = [*map(int, starts)], np.array([*map(int, stops)], dtype=np.intp)
        kept, stays = (
            np.stack([totals.from_layer(start)[end] for start in begin]) for totals in (self._kept, self._stays)
        )
        forward_s, window_s = (sums[None, end] - sums[begin, None] for sums in (self._forward_s, self._window_s))
        return Unit(stays, kept - stays, forward_s, window_s)

    def late_s(self, unit: Unit) -> Floats:
        """Return the seconds that copies take longer than what hides them: vPipe (TPDS'21) equation 2."""
        return np.maximum(0.0, copies_s(unit.swapped_bytes, self.pcie_bytes_per_s) - unit.window_s)

    def virtual(self, start: int, stop: int) -> VirtualMemory:
        """Return what becomes of the activations of one stage; arguments as in `of`."""
        unit, last = self.of([start], [stop]), len(self._rows) - 1
        kept, swapped, recomputed = map(self._policies[start : min(stop, last)].count, (KEEP, SWAP, RECOMPUTE))
        return VirtualMemory(
            kept,
            swapped,
            recomputed,
            swapped_bytes=int(unit.swapped_bytes[0, 0]),
            copies_s=float(copies_s(unit.swapped_bytes, self.pcie_bytes_per_s)[0, 0]),
            window_s=float(unit.window_s[0, 0]),
            again_s=sum(self._rows[i].forward_s for i in range(start, stop) if self._policies[i] == RECOMPUTE),
        )


class _Totals:
    """The bytes that all stages hold.

    Args:
        num_rows: layers, the loss included.
        held: of every tensor, who holds it, in order of layers.
    """

    def __init__(self, num_rows: int, held: Iterable[Sequence[_Hold]]) -> None:
        ranges = np.array([each for holds in held for each in _ranges(holds)], dtype=np.intp).reshape(-1, 4)
        self._from, self._to, self._layer, self._bytes = ranges.T
        self._num_rows = num_rows
        self.from_layer = lru_cache(_MOST_STARTS)(self._totals)

    def _totals(self, start: int) -> Floats:
        """Return the bytes of the stages that begin at a layer, by the layer after their last."""
        counts = (self._from <= start) & (start <= self._to)
        each = np.bincount(self._layer[counts] + 1, self._bytes[counts], self._num_rows + 1)
        total: Floats = np.cumsum(each)
        return total


def _ranges(holds: Sequence[_Hold]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first start, last start, layer, bytes): the stages that begin there hold a tensor from that layer on."""
    free: list[tuple[int, float]] = [(0, math.inf)]  # starts of stages that no layer holds it in yet
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
    """Return of every tensor which layers hold it; what swaps is gone. As `simulate.memory.kept_bytes` tells it."""
    held: dict[object, list[_Hold]] = defaultdict(list)
    tells_storages, gone, run = any(row.puts_out for row in rows), again | swapped, 0
    for index, row in enumerate(rows):
        if index not in again:
            run = index + 1
        if index in again:
            for number, num_bytes in row.takes:
                held[number].append(_Hold(index, num_bytes))
            for source in row.reads:
                after = -1 if source < run else source  # what the run makes itself is there where a cut parts it
                if not tells_storages:
                    held[run, source].append(_Hold(index, rows[source].output_bytes, after))
                    continue
                copied = rows[source].runs_once  # but what comes from another stage is a copy already
                for number, num_bytes in rows[source].puts_out:
                    if copied:
                        held[run, number].append(_Hold(index, num_bytes, until=source))
                    held[number].append(_Hold(index, num_bytes, source if copied else after))
        elif tells_storages:
            for number, num_bytes in row.keeps if index not in swapped else ():
                held[number].append(_Hold(index, num_bytes))
        elif index not in swapped:
            held[index, "own"].append(_Hold(index, row.saved_bytes))
            for position, (holder, num_bytes) in enumerate(row.saved_with):
                first = _first_that_keeps(rows, gone, holder, num_bytes)
                held[index, position].append(_Hold(index, num_bytes, first))
    return held.values()


def _first_that_keeps(rows: Sequence[LayerProfile], gone: set[int], holder: int, num_bytes: int) -> int:
    """Return the last layer of those that save a tensor, a layer and others before it, that keeps it; or -1."""
    while holder in gone and num_bytes > rows[holder].saved_bytes:  # it isn't one that this layer is the first to save
        holder = next((before for before, n in rows[holder].saved_with if n >= num_bytes), -1)
    return -1 if holder in gone else holder
