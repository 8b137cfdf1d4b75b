"""Graph coarsening: `coarsen` of vPipe (TPDS'21) section 4.2, Algorithm 3.

Layers are in order of execution. An edge is *critical* between consecutive layers, *sparse* if it spans more than one
part's time, else part of a *sub-graph*, such as a residual block. Sub-graph edges are merged into the critical edges
that they pass, whose weight is then the cost of a cut there. Sparse edges stay.

Differs: the listing doesn't say which layers form a node. Here: those joined by critical edges, heaviest first, while a
node holds at most a part's time over `NODES_PER_PART`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipebench.planner.partition.graph import TimedGraph

# The paper's coarse graphs of 16 parts have 2.9 (GNMT) to 8.3 (AmoebaNet) nodes a part.
NODES_PER_PART = 8


@dataclass(frozen=True)
class Coarse:
    """A small graph, and the layers of its nodes."""

    graph: TimedGraph  # parallel edges merged
    first: tuple[int, ...]  # first layer of every node; a node's layers are consecutive
    num_layers: int  # of all nodes

    def layers(self, node: int) -> range:
        """Return a node's layers."""
        stops = (*self.first[1:], self.num_layers)
        return range(self.first[node], stops[node])


def coarsen(graph: TimedGraph, num_parts: int) -> Coarse:
    """Coarsen a graph that is to be cut in `num_parts`."""
    part_s = sum(graph.seconds) / num_parts
    node_s, parent = [*graph.seconds], [*range(len(graph))]  # union-find: parents lead to a node's first layer

    def first_of(layer: int) -> int:
        while parent[layer] != layer:
            parent[layer] = layer = parent[parent[layer]]
        return layer

    weights = _critical_weights(graph, part_s)
    for layer in sorted(range(1, len(graph)), key=lambda layer: -weights[layer]):  # stable: ties in order of execution
        first = first_of(layer - 1)
        if node_s[first] + node_s[layer] <= part_s / NODES_PER_PART:
            node_s[first] += node_s[layer]  # each is a node's first layer
            parent[layer] = first
    return _merged(graph, [layer for layer, first in enumerate(parent) if first == layer])


def _critical_weights(graph: TimedGraph, part_s: float) -> list[int]:
    """Return per layer the weight of the critical edge before it, sub-graphs included."""
    begun_s = [0.0, *itertools.accumulate(graph.seconds)]
    steps = [0] * (len(graph) + 1)
    for source, target, num_bytes in graph.edges:
        if target - source == 1 or begun_s[target] - begun_s[source] <= part_s:
            steps[source + 1] += num_bytes
            steps[target + 1] -= num_bytes
    return [*itertools.accumulate(steps)]


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
