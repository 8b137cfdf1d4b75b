"""A graph cut into p parts of similar time with little traffic between them: plain Kernighan-Lin, and Algorithm 3.

Paper: vPipe (TPDS'21) section 4.2. Both halve the graph, and the halves, until there are p parts; each halving begins
in the order of time stamps and is improved by exchanges. Algorithm 3 halves a coarse graph, since the cost of exchanges
grows with the square of a graph's size, then maps the parts back to the layers and exchanges layers at the boundaries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.planner.partition import TOLERANCE, Coarse, TimedGraph, coarsen
from reports.studies.kernighan_lin import Balance, Halves, exchanged, neighbours_of, seconds_of

_MOST_SWEEPS = 8  # over the boundaries; a boundary whose parts haven't changed since its last exchange is skipped
_PATIENCE = 16  # exchanges in a row without a gain after which a boundary's pass ends: enough to pass a block of layers


@dataclass(frozen=True)
class Parts:
    """The parts of a graph."""

    # The layers of each part, in order of time stamps. Halving orders the parts.
    parts: tuple[tuple[int, ...], ...]
    passes: int  # the most passes that one halving took
    coarse: Coarse | None = None  # the coarse graph of Algorithm 3; None for plain Kernighan-Lin

    @property
    def part_of(self) -> list[int]:
        """The part of every layer."""
        found = [0] * sum(map(len, self.parts))
        for index, part in enumerate(self.parts):
            for layer in part:
                found[layer] = index
        return found


def plain(graph: TimedGraph, num_parts: int) -> Parts:
    """Cut a graph by Kernighan-Lin's exchanges on all of its layers.

    A half may deviate from its share by `TOLERANCE` times the mean seconds of a part, and further only if the order of
    time stamps that it begins with does.

    Args:
        graph: at least `num_parts` layers.
        num_parts: 1 or more.
    """
    slack_s = TOLERANCE * sum(graph.seconds) / num_parts
    parts, passes = _halved(graph, tuple(range(len(graph))), num_parts, slack_s)
    return Parts(tuple(parts), passes)


def algorithm_3(graph: TimedGraph, num_parts: int) -> Parts:
    """Cut a graph by vPipe's Algorithm 3; for arguments and balance see `plain`."""
    coarse = coarsen(graph, num_parts)
    if len(coarse.graph) < num_parts:
        coarse = Coarse(graph, tuple(range(len(graph))), len(graph))
    slack_s = TOLERANCE * sum(graph.seconds) / num_parts
    nodes, passes = _halved(coarse.graph, tuple(range(len(coarse.graph))), num_parts, slack_s)
    parts = [tuple(layer for node in part for layer in coarse.layers(node)) for part in nodes]
    return Parts(tuple(_refined(graph, coarse, parts, slack_s)), passes, coarse)


def _halved(
    graph: TimedGraph, layers: tuple[int, ...], num_parts: int, slack_s: float
) -> tuple[list[tuple[int, ...]], int]:
    """Halve some layers of a graph, and the halves, into `num_parts`; return them and the most passes of a halving."""
    if num_parts == 1:
        return [layers], 0
    counts = (num_parts - num_parts // 2, num_parts // 2)
    balance = Balance(seconds_of(graph, layers) * counts[0] / num_parts, slack_s, counts)
    halves = exchanged(graph, _in_time_order(graph, layers, balance), balance)
    found = [_halved(graph, *half, slack_s) for half in zip((halves.left, halves.right), counts, strict=True)]
    return [part for parts, _ in found for part in parts], max(halves.passes, *(passes for _, passes in found))


def _in_time_order(graph: TimedGraph, layers: Sequence[int], balance: Balance) -> Halves:
    """Cut layers in their order: at the balanced place with the fewest bytes, or else the place nearest to balance."""
    first, last = balance.at_least[0], len(layers) - balance.at_least[1]
    passing, found, neighbours = 0, [], neighbours_of(graph)
    left_s, known = 0.0, {*layers}
    for position, layer in enumerate(layers, 1):
        left_s += graph.seconds[layer]
        for other, num_bytes in neighbours[layer].items():
            if other in known:
                passing += num_bytes if other > layer else -num_bytes
        if first <= position <= last:
            off_s = abs(left_s - balance.left_s)
            found.append((max(0.0, off_s - balance.slack_s), passing, off_s, position))
    *_, position = min(found)
    return Halves(tuple(layers[:position]), tuple(layers[position:]))


def _refined(graph: TimedGraph, coarse: Coarse, parts: list[tuple[int, ...]], slack_s: float) -> list[tuple[int, ...]]:
    """Return the parts after exchanges, at every boundary, of single layers of the coarse nodes there."""
    node_of = [node for node in range(len(coarse.graph)) for _ in coarse.layers(node)]
    # The two parts at each boundary after its last exchange.
    settled: list[tuple[tuple[int, ...], ...]] = [()] * (len(parts) - 1)
    for _ in range(_MOST_SWEEPS):
        for index in range(len(parts) - 1):
            left, right = pair = parts[index], parts[index + 1]
            if settled[index] == pair:
                continue
            free = _beside(graph, coarse, node_of, left, right)
            balance = Balance((seconds_of(graph, left) + seconds_of(graph, right)) / 2, slack_s)
            halves = exchanged(graph, Halves(left, right), balance, free=free, patience=_PATIENCE)
            parts[index], parts[index + 1] = settled[index] = halves.left, halves.right
    return parts


def _beside(
    graph: TimedGraph, coarse: Coarse, node_of: Sequence[int], left: Sequence[int], right: Sequence[int]
) -> set[int]:
    """Return the layers of two parts whose coarse node has an edge from one part to the other."""
    own, others, neighbours = {*left}, {*right}, neighbours_of(graph)
    cut = [(layer, other) for layer in left for other in neighbours[layer] if other in others]
    nodes = {node_of[layer] for edge in cut for layer in edge}
    return {layer for node in nodes for layer in coarse.layers(node) if layer in own or layer in others}
