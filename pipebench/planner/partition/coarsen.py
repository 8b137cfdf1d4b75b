"""A graph made small before it is cut: vPipe (TPDS'21) section 4.2, Algorithm 3, `coarsen`.

Layers are in the order of their time stamps. An edge is *critical* between layers that follow each other, *sparse* if
more time than one part's lies between its ends, and else it is of a *sub-graph*, such as a residual block. Edges of
sub-graphs are merged into the critical edges that they pass by, which then weigh what a cut there would cost. Sparse
edges stay.

Differs: the listing doesn't say which layers become one node. Here those that critical edges join, the heaviest first,
as long as a node holds no more than a part's time over `NODES_PER_PART`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.planner.partition.graph import TimedGraph

# The paper's coarse graphs of 16 parts have 2.9 (GNMT) to 8.3 (AmoebaNet) nodes a part.
NODES_PER_PART = 8


@dataclass(frozen=True)
class Coarse:
    """A small graph, and what each of its nodes holds.

    Attributes:
        graph: edges between the same two nodes are one.
        first: the first layer of every node; a node's layers follow each other.
        num_layers: of all nodes.
    """

    graph: TimedGraph
    first: tuple[int, ...]
    num_layers: int

    def layers(self, node: int) -> range:
        """Return a node's layers."""
        stops = (*self.first[1:], self.num_layers)
        return range(self.first[node], stops[node])


def coarsen(graph: TimedGraph, num_parts: int) -> Coarse:
    """Make a graph small that is to be cut in so many parts."""
    part_s = sum(graph.seconds) / num_parts
    node_s, nodes = [*graph.seconds], _Nodes(len(graph))
    weights = _critical_weights(graph, part_s)
    for layer in sorted(range(1, len(graph)), key=lambda layer: -weights[layer]):  # stable: ties in order of time
        first = nodes.first(layer - 1)
        if node_s[first] + node_s[layer] <= part_s / NODES_PER_PART:
            node_s[first] += node_s[layer]  # each is a node's first layer
            nodes.join(first, layer)
    return _merged(graph, nodes.firsts())


def _critical_weights(graph: TimedGraph, part_s: float) -> list[int]:
    """Return for every layer what the critical edge before it weighs, sub-graphs merged into it."""
    begun_s = [0.0, *itertools.accumulate(graph.seconds)]
    steps = [0] * (len(graph) + 1)
    for source, target, num_bytes in graph.edges:
        if target - source == 1 or begun_s[target] - begun_s[source] <= part_s:
            steps[source + 1] += num_bytes
            steps[target + 1] -= num_bytes
    return [*itertools.accumulate(steps)]


class _Nodes:
    """Layers in nodes of neighbours."""

    def __init__(self, num_layers: int) -> None:
        self._parent = [*range(num_layers)]  # leads to the first layer of the node

    def first(self, layer: int) -> int:
        """Return the first layer of a layer's node."""
        parent = self._parent
        while parent[layer] != layer:
            parent[layer] = layer = parent[parent[layer]]
        return layer

    def join(self, first: int, second: int) -> None:
        """Make one node of two, each given by its first layer."""
        self._parent[second] = first

    def firsts(self) -> list[int]:
        """Return the first layer of every node."""
        return [layer for layer, parent in enumerate(self._parent) if parent == layer]


def _merged(graph: TimedGraph, firsts: Sequence[int]) -> Coarse:
    node_of: list[int] = []
    for node, (first, stop) in enumerate(zip(firsts, [*firsts[1:], len(graph)], strict=True)):
        node_of += [node] * (stop - first)
    seconds = [0.0] * len(firsts)
    for layer, node in enumerate(node_of):
        seconds[node] += graph.seconds[layer]
    joined: dict[tuple[int, int], int] = {}
    for source, target, num_bytes in graph.edges:
        pair = node_of[source], node_of[target]
        if pair[0] != pair[1]:
            joined[pair] = joined.get(pair, 0) + num_bytes
    edges = tuple((source, target, num_bytes) for (source, target), num_bytes in joined.items())
    return Coarse(TimedGraph(tuple(seconds), edges), tuple(firsts), len(graph))
