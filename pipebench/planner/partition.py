"""Cuts into consecutive layers, as pipelines need them: vPipe's Algorithm 3 under that restriction, and the optimum.

Paper: vPipe (TPDS'21) section 4.2. Steps as in the listing: coarsen, halve, project back, refine at each boundary.
Differs: Algorithm 3 exchanges any two layers. Stages are consecutive, so only the layers beside a boundary can change
stages. A Kernighan-Lin pass continues through exchanges that lose; likewise a boundary is tried at every position that
the balance allows, and the position with the fewest bytes wins.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

from pipebench.errors import PlanError
from pipebench.profile.model import LayerProfile

Edge = tuple[int, int, int]  # a layer, a later one that reads it, bytes


@dataclass(frozen=True)
class TimedGraph:
    """Layers in order of execution."""

    seconds: tuple[float, ...]  # forward and backward of every layer
    edges: tuple[Edge, ...]  # between a layer and its readers

    def __len__(self) -> int:
        return len(self.seconds)

    def cut_bytes(self, part_of: Sequence[int]) -> int:
        """Return the bytes of edges between parts, given the part of every layer."""
        return sum(num_bytes for source, target, num_bytes in self.edges if part_of[source] != part_of[target])


def timed_graph(rows: Sequence[LayerProfile], seconds: Sequence[float] | None = None) -> TimedGraph:
    """Return a profile's layers as a graph; the loss, last in `rows`, is part of the last layer.

    Args:
        rows: the layers.
        seconds: measured forward and backward of every row, in place of the profile's.
    """
    each = [row.forward_s + row.backward_s for row in rows] if seconds is None else [*seconds]
    edges = [
        (source, index, rows[source].output_bytes + rows[source].gradient_bytes)
        for index, row in enumerate(rows[:-1])
        for source in row.reads
    ]
    return TimedGraph((*each[:-2], each[-2] + each[-1]), tuple(edges))


# The paper's coarse graphs of 16 parts have 2.9 (GNMT) to 8.3 (AmoebaNet) nodes a part.
NODES_PER_PART = 8


@dataclass(frozen=True)
class Coarse:
    """A small graph whose nodes are consecutive layers of a larger one."""

    graph: TimedGraph  # parallel edges merged
    first: tuple[int, ...]  # first layer of every node
    num_layers: int  # of all nodes together

    def layers(self, node: int) -> range:
        """Return a node's layers."""
        stops = (*self.first[1:], self.num_layers)
        return range(self.first[node], stops[node])


def coarsen(graph: TimedGraph, num_parts: int) -> Coarse:
    """Coarsen a graph that is to be cut in `num_parts`: `coarsen` of Algorithm 3.

    An edge between consecutive layers is *critical*. An edge that spans more than one part's time is *sparse*. Other
    edges belong to a *sub-graph*, such as a residual block, and are merged into the critical edges that they pass,
    whose weights are then the costs of cuts. Sparse edges stay.

    Differs: the listing doesn't say which layers form a node. Here: those joined by critical edges, heaviest first,
    while a node holds at most a part's time over `NODES_PER_PART`.
    """
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
            node_s[first] += node_s[layer]  # node_s is valid at the first layers of nodes
            parent[layer] = first
    return _merged(graph, [layer for layer, first in enumerate(parent) if first == layer])


def _critical_weights(graph: TimedGraph, part_s: float) -> list[int]:
    """Return the weight of the critical edge before every layer, in bytes, with those of sub-graphs."""
    begun_s = [0.0, *itertools.accumulate(graph.seconds)]
    steps = [0] * (len(graph) + 1)
    for source, target, num_bytes in graph.edges:
        if target - source == 1 or begun_s[target] - begun_s[source] <= part_s:
            steps[source + 1] += num_bytes
            steps[target + 1] -= num_bytes
    return [*itertools.accumulate(steps)]


def _merged(graph: TimedGraph, firsts: Sequence[int]) -> Coarse:
    """Return the graph of nodes that begin with the layers `firsts`."""
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


TOLERANCE = 0.05  # of a part's time: how far a halving may be from equal shares
Fits = Callable[[int, int, int], bool]  # whether stage i fits as layers [start, stop)
_MOST_SWEEPS = 100  # over all boundaries; each improves the parts, and few are needed
_SAME = 1e-9  # relative: seconds that differ by rounding only


@dataclass(frozen=True)
class LayerChain:
    """Layers in order of execution, to be cut into consecutive parts."""

    graph: TimedGraph
    may_start: Collection[int] | None = None  # layers that a part may begin with; None: any but the first
    fits: Fits | None = None  # whether a part's memory suffices; None: it does

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Layers that a part may begin with, ascending."""
        return tuple(range(1, len(self.graph)) if self.may_start is None else sorted(self.may_start))

    @cached_property
    def begun_s(self) -> tuple[float, ...]:
        """Seconds of all layers before each."""
        return (0.0, *itertools.accumulate(self.graph.seconds))

    @cached_property
    def passing_bytes(self) -> tuple[int, ...]:
        """Bytes that a cut before each layer carries, counting every value once."""
        furthest: dict[int, tuple[int, int]] = {}
        for source, target, num_bytes in self.graph.edges:
            far, most = furthest.get(source, (0, 0))
            furthest[source] = max(far, target), max(most, num_bytes)
        steps = [0] * (len(self.graph) + 1)
        for source, (target, num_bytes) in furthest.items():
            steps[source + 1] += num_bytes
            steps[target + 1] -= num_bytes
        return tuple(itertools.accumulate(steps))

    def time(self, start: int, stop: int) -> float:
        """Return the seconds of the layers [start, stop)."""
        return self.begun_s[stop] - self.begun_s[start]

    def ends(self, starts: Sequence[int]) -> tuple[int, ...]:
        """Return where parts begin and, last, end."""
        return (0, *starts, len(self.graph))

    def slowest_s(self, starts: Sequence[int]) -> float:
        """Return the seconds of the slowest part."""
        return max(self.time(a, b) for a, b in itertools.pairwise(self.ends(starts)))

    def fit(self, starts: Sequence[int]) -> bool:
        """Return whether every part fits in memory."""
        return self.num_unfit(self.ends(starts), range(len(starts) + 1)) == 0

    def num_unfit(self, ends: Sequence[int], parts: Sequence[int]) -> int:
        """Return how many of some parts don't fit, given where all begin and end."""
        if self.fits is None:
            return 0
        return sum(not self.fits(part, ends[part], ends[part + 1]) for part in parts)


def repartition(line: LayerChain, starts: Sequence[int], tolerance: float = TOLERANCE) -> tuple[int, ...]:
    """Return the starts of parts by Algorithm 3, or the current ones if those are as good.

    Parts are better if fewer of them don't fit or, if equally many fit, if the slowest is faster. If Algorithm 3's
    parts don't fit, the optimum that fits replaces them, if there is one.

    Args:
        line: the layers.
        starts: current first layers of all parts but the first.
        tolerance: allowed deviation of a halving from equal shares, as a fraction of a part's time.

    Raises:
        PlanError: fewer places to cut than parts need.
    """
    found = algorithm_3_consecutive(line, len(starts) + 1, tolerance)
    if not line.fit(found):
        with suppress(PlanError):
            found = best_consecutive(line, len(starts) + 1)

    def badness(given: Sequence[int]) -> tuple[int, float]:
        return line.num_unfit(line.ends(given), range(len(given) + 1)), line.slowest_s(given)

    unfit, slowest_s = badness(starts)
    return found if badness(found) < (unfit, slowest_s * (1 - _SAME)) else tuple(starts)


def algorithm_3_consecutive(line: LayerChain, num_parts: int, tolerance: float = TOLERANCE) -> tuple[int, ...]:
    """Return the first layers of all parts but the first by Algorithm 3; see `repartition`.

    Boundaries move towards memory that suffices, but the result may not fit.
    """
    if len(line.positions) < num_parts - 1:
        raise PlanError(f"{num_parts} stages were asked for, but the model can be cut in {len(line.positions) + 1}")
    places = sorted({*coarsen(line.graph, num_parts).first} & {*line.positions})
    if len(places) < num_parts - 1:
        places = [*line.positions]
    slack_s = tolerance * line.begun_s[-1] / num_parts
    return _refined(line, _halved(line, (0, len(line.graph)), places, num_parts, slack_s), slack_s)


def best_consecutive(line: LayerChain, num_parts: int) -> tuple[int, ...]:
    """Return the first layers of all parts but the first with the least slowest part; of those, any.

    Exact dynamic programming over parts and places to cut, bounded from above by Algorithm 3's result.

    Raises:
        PlanError: no such parts.
    """
    guess = algorithm_3_consecutive(line, num_parts)
    limit_s = line.slowest_s(guess) * (1 + _SAME) if line.fit(guess) else math.inf
    ends = [0, *line.positions, len(line.graph)]
    reached = {0: 0.0}  # where the parts so far can end, and the slowest of them
    before: list[dict[int, int]] = []
    for part in range(num_parts):
        following: dict[int, float] = {}
        nearest: dict[int, int] = {}
        later = num_parts - part - 1
        for stop in range(part + 1, len(ends) - later) if later else (len(ends) - 1,):
            if line.time(ends[stop], ends[-1]) > later * limit_s:
                continue
            for start in range(stop - 1, part - 1, -1):
                seconds = line.time(ends[start], ends[stop])
                if seconds > limit_s or seconds >= following.get(stop, math.inf):  # longer parts are slower still
                    break
                slowest_s = max(reached.get(start, math.inf), seconds)
                if slowest_s >= following.get(stop, math.inf):
                    continue
                if line.fits is None or line.fits(part, ends[start], ends[stop]):
                    following[stop], nearest[stop] = slowest_s, start
        reached = following
        before.append(nearest)
    if len(ends) - 1 not in reached:
        raise PlanError(f"the model can't be cut in {num_parts} stages that fit")
    starts, stop = [], len(ends) - 1
    for nearest in reversed(before[1:]):
        stop = nearest[stop]
        starts.append(ends[stop])
    return tuple(reversed(starts))


def _halved(
    line: LayerChain, ends: tuple[int, int], places: Sequence[int], num_parts: int, slack_s: float
) -> tuple[int, ...]:
    """Return the starts of all parts but the first between two ends, by repeated halving."""
    if num_parts == 1:
        return ()
    counts = (num_parts - num_parts // 2, num_parts // 2)
    share_s = line.time(*ends) * counts[0] / num_parts
    inside = places[bisect.bisect_right(places, ends[0]) : bisect.bisect_left(places, ends[1])]
    choices = inside[counts[0] - 1 : len(inside) - counts[1] + 1]  # either half still has to be cut

    def badness(start: int) -> tuple[float, int, float]:
        off_s = abs(line.time(ends[0], start) - share_s)
        return max(0.0, off_s - slack_s), line.passing_bytes[start], off_s

    middle = min(choices, key=badness)
    left = _halved(line, (ends[0], middle), places, counts[0], slack_s)
    return (*left, middle, *_halved(line, (middle, ends[1]), places, counts[1], slack_s))


def _refined(line: LayerChain, starts: Sequence[int], slack_s: float) -> tuple[int, ...]:
    """Return starts after moving every boundary to its best place until none moves.

    Criteria, in this order: parts that fit in memory, parts no slower than their share and the slack, fewer bytes,
    parts of similar time. Each is a sum over parts and boundaries that no move increases.
    """
    ends = [*line.ends(starts)]
    most_s = line.begun_s[-1] / (len(ends) - 1) + slack_s

    def badness(boundary: int, start: int) -> tuple[int, float, int, float]:
        moved = [*ends[:boundary], start, *ends[boundary + 1 :]]
        pair_s = line.time(ends[boundary - 1], start), line.time(start, ends[boundary + 1])
        late = sum(round(max(0.0, each / most_s - 1), 9) ** 2 for each in pair_s)
        unfit = line.num_unfit(moved, (boundary - 1, boundary))
        return unfit, late, line.passing_bytes[start], round(abs(pair_s[0] - pair_s[1]) / most_s, 9)

    for _ in range(_MOST_SWEEPS):
        before = [*ends]
        for boundary in range(1, len(ends) - 1):
            places = line.positions
            first = bisect.bisect_right(places, ends[boundary - 1])
            choices = places[first : bisect.bisect_left(places, ends[boundary + 1])]
            ends[boundary] = min([ends[boundary], *choices], key=partial(badness, boundary))
        if ends == before:
            break
    return tuple(ends[1:-1])
