"""Bisection of a graph by exchanging layers: Kernighan and Lin, An Efficient Heuristic Procedure, 1970.

A pass exchanges the pair of layers with the largest gain, repeatedly, each layer once, even if the gain is negative. It
then keeps the first exchanges whose gains have the largest sum. Passes are repeated until one gains nothing.

Layers differ in time, so the parts are balanced in seconds, within a slack. As the authors propose for parts of unequal
size, a layer can also be exchanged with a dummy of no time and no edges: that is, a layer may move alone.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipebench.planner.partition import TimedGraph

# Differs: of each part, only this many layers with the largest gains are candidates. The best pair is nearly always
# among the first few; where balance forbids these, looking at all others would make a pass quadratic.
_LOOKED_AT = 16
_SAME = 1e-9  # relative: smaller differences in seconds are rounding


@dataclass(frozen=True)
class Halves:
    """Two parts, each in the order of time stamps."""

    left: tuple[int, ...]  # layers of the first part
    right: tuple[int, ...]  # layers of the second part
    passes: int = 0  # passes that made them, including the last one, which gained nothing


@dataclass(frozen=True)
class Balance:
    """Limits of a bisection."""

    left_s: float  # the left part's seconds that are wanted
    slack_s: float  # the most by which they may differ
    at_least: tuple[int, int] = (1, 1)  # fewest layers of the left and of the right part


def neighbours_of(graph: TimedGraph) -> list[dict[int, int]]:
    """Return, for every layer, the bytes of its edges in both directions by neighbour."""
    found: list[dict[int, int]] = [{} for _ in graph.seconds]
    for source, target, num_bytes in graph.edges:
        found[source][target] = found[source].get(target, 0) + num_bytes
        found[target][source] = found[target].get(source, 0) + num_bytes
    return found


def seconds_of(graph: TimedGraph, layers: Iterable[int]) -> float:
    """Return the sum of some layers' seconds."""
    return sum(graph.seconds[layer] for layer in layers)


def exchanged(
    graph: TimedGraph,
    start: Halves,
    balance: Balance,
    *,
    free: Collection[int] | None = None,
    patience: float = math.inf,
) -> Halves:
    """Improve two parts by passes until one gains nothing.

    Args:
        graph: its layers that are in neither part are ignored.
        start: the parts to begin with. If they aren't balanced, the result is at least as near to balance.
        balance: limits of the parts.
        free: the layers that may change sides; all of both parts by default.
        patience: a pass ends after this many exchanges in a row without a new largest sum of gains.
    """
    slack_s = max(balance.slack_s, abs(seconds_of(graph, start.left) - balance.left_s) * (1 + _SAME))
    balance = replace(balance, slack_s=slack_s)
    side = dict.fromkeys(start.left, 0) | dict.fromkeys(start.right, 1)
    passes = 0
    while True:
        passes += 1
        taken = _Pass(graph, side, balance, side if free is None else free).best(patience)
        if not taken:
            left, right = (tuple(sorted(layer for layer, own in side.items() if own == half)) for half in (0, 1))
            return Halves(left, right, passes)
        for layer in taken:
            side[layer] = 1 - side[layer]


class _Pass:
    """One pass: makes exchanges tentatively, and finds which of them to keep."""

    def __init__(self, graph: TimedGraph, side: dict[int, int], balance: Balance, free: Collection[int]) -> None:
        self._graph, self._neighbours, self._balance = graph, neighbours_of(graph), balance
        self._side = dict(side)
        self._left_s = seconds_of(graph, (layer for layer, own in side.items() if own == 0))
        self._counts = [sum(own == half for own in side.values()) for half in (0, 1)]
        self._gain = {layer: self._gain_of(layer) for layer in free}
        self._heaps: list[list[tuple[int, int]]] = [[], []]
        for layer, gain in self._gain.items():
            self._heaps[side[layer]].append((-gain, layer))
        for heap in self._heaps:
            heapq.heapify(heap)

    def best(self, patience: float) -> list[int]:
        """Return the layers that change sides; empty if that gains neither bytes nor balance."""
        moved: list[int] = []
        gained, kept, since = 0, 0, 0
        most, nearest_s = 0, abs(self._left_s - self._balance.left_s)
        while since < patience and (step := self._step()) is not None:
            gain, layers = step
            for layer in layers:
                self._move(layer)
            moved += layers
            gained, since = gained + gain, since + 1
            off_s = abs(self._left_s - self._balance.left_s)
            if gained > most or (gained == most and off_s < nearest_s - _SAME * self._balance.left_s):
                most, nearest_s, kept, since = gained, off_s, len(moved), 0
        return moved[:kept]

    def _gain_of(self, layer: int) -> int:
        """Return by how many bytes the cut shrinks when a layer moves."""
        own, total = self._side[layer], 0
        for other, num_bytes in self._neighbours[layer].items():
            if other in self._side:
                total += num_bytes if self._side[other] != own else -num_bytes
        return total

    def _move(self, layer: int) -> None:
        """Change a layer's side for the rest of the pass, and update its neighbours' gains."""
        own, seconds = self._side[layer], self._graph.seconds[layer]
        self._side[layer] = 1 - own
        self._left_s += seconds if own else -seconds
        self._counts[own] -= 1
        self._counts[1 - own] += 1
        self._gain.pop(layer)
        for other, num_bytes in self._neighbours[layer].items():
            if other in self._gain:
                self._gain[other] += 2 * num_bytes if self._side[other] == own else -2 * num_bytes
                heapq.heappush(self._heaps[self._side[other]], (-self._gain[other], other))

    def _step(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the largest gain and its layers, one that moves or two that are exchanged; None if none may move."""
        fronts = [_Front(heap, self._gain) for heap in self._heaps]
        best: tuple[float, tuple[int, ...]] = (-math.inf, ())
        for front in fronts:
            for layer in front:
                if self._gain[layer] <= best[0]:
                    break
                if self._allows((layer,)):
                    best = self._gain[layer], (layer,)
                    break
        for left in fronts[0]:
            pairs = 0
            for right in fronts[1]:
                bound = self._gain[left] + self._gain[right]
                if bound <= best[0]:
                    break
                pairs += 1
                gain = bound - 2 * self._neighbours[left].get(right, 0)
                if gain > best[0] and self._allows((left, right)):
                    best = gain, (left, right)
            if not pairs:
                break
        for front in fronts:
            front.put_back()
        return (int(best[0]), best[1]) if best[1] else None

    def _allows(self, layers: Sequence[int]) -> bool:
        """Return whether the parts are balanced after these layers change sides."""
        left_s, counts = self._left_s, [*self._counts]
        for layer in layers:
            own = self._side[layer]
            left_s += self._graph.seconds[layer] if own else -self._graph.seconds[layer]
            counts[own] -= 1
            counts[1 - own] += 1
        enough = all(count >= least for count, least in zip(counts, self._balance.at_least, strict=True))
        return enough and abs(left_s - self._balance.left_s) <= self._balance.slack_s


class _Front:
    """The layers of one side with the largest gains, in that order; taken from its heap only as far as iterated."""

    def __init__(self, heap: list[tuple[int, int]], gain: Mapping[int, int]) -> None:
        self._heap, self._gain = heap, gain
        self._taken: list[int] = []

    def __iter__(self) -> Iterator[int]:
        yield from self._taken
        while self._heap and len(self._taken) < _LOOKED_AT:
            gain, layer = heapq.heappop(self._heap)
            # The heap keeps outdated entries: drop one whose gain has changed since, or that is there twice.
            if self._gain.get(layer) == -gain and layer not in self._taken:
                self._taken.append(layer)
                yield layer

    def put_back(self) -> None:
        """Return the taken layers to the heap."""
        for layer in self._taken:
            heapq.heappush(self._heap, (-self._gain[layer], layer))
