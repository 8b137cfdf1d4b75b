"""Algorithm 3 against brute force on small graphs."""

import itertools
import random
from collections.abc import Sequence

import pytest

from pipebench.errors import PlanError
from pipebench.planner.partition import (
    NODES_PER_PART,
    LayerChain,
    TimedGraph,
    algorithm_3_consecutive,
    best_consecutive,
    coarsen,
    repartition,
    timed_graph,
)
from tests.planner.problems import chain

SEEDS = range(60)


def graph(seed: int, num_layers: int) -> TimedGraph:
    """Return layers that each read one to three of those before, mostly near ones."""
    draw = random.Random(seed)
    edges = []
    for target in range(1, num_layers):
        near = [max(0, target - 1 - int(draw.expovariate(0.5))) for _ in range(draw.randint(1, 3))]
        edges += [(source, target, draw.randrange(1, 100)) for source in sorted({*near})]
    seconds = tuple(draw.choice([0.0, 1.0, draw.random(), draw.expovariate(1.0)]) for _ in range(num_layers))
    return TimedGraph(seconds, tuple(edges))


def crossing(given: TimedGraph, left: Sequence[int]) -> int:
    """Return the bytes of edges with one end among some layers."""
    inside = {*left}
    return sum(num_bytes for a, b, num_bytes in given.edges if (a in inside) != (b in inside))


def off_s(given: TimedGraph, left: Sequence[int], target_s: float) -> float:
    return abs(sum(given.seconds[layer] for layer in left) - target_s)


@pytest.mark.parametrize("seed", range(20))
def test_a_coarse_graph_costs_as_much_as_its_layers(seed: int) -> None:
    given = graph(seed, 80)
    coarse = coarsen(given, 4)
    small = coarse.graph
    held = [coarse.layers(node) for node in range(len(small))]
    assert [layer for layers in held for layer in layers] == [*range(80)]
    most_s = sum(given.seconds) / 4 / NODES_PER_PART
    for node, layers in enumerate(held):
        assert small.seconds[node] == pytest.approx(sum(given.seconds[layer] for layer in layers))
        assert len(layers) == 1 or small.seconds[node] <= most_s
    draw = random.Random(seed)
    parts = [draw.randrange(4) for _ in held]
    part_of = [part for part, layers in zip(parts, held, strict=True) for _ in layers]
    assert small.cut_bytes(parts) == given.cut_bytes(part_of)


def test_sparse_edges_are_not_merged_into_the_critical_ones() -> None:
    """A node holds two layers here. If sparse edges were merged too, layers beside one would be merged first."""
    links = [(layer, layer + 1, 10) for layer in range(31)]
    given = TimedGraph((0.125,) * 32, (*links, (1, 27, 1000), (7, 9, 5)))
    coarse = coarsen(given, 2)
    held = [tuple(coarse.layers(node)) for node in range(len(coarse.first))]
    assert held[:6] == [(0, 1), (2, 3), (4, 5), (6,), (7, 8), (9, 10)]
    assert (0, 14, 1000) in coarse.graph.edges


def slowest(seconds: Sequence[float], starts: Sequence[int]) -> float:
    ends = [0, *starts, len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_consecutive_parts_equal_brute_force_s(seed: int) -> None:
    draw = random.Random(seed)
    given, num_parts = graph(seed, 9), draw.randrange(1, 6)
    may_start = sorted(draw.sample(range(1, 9), draw.randrange(num_parts - 1, 9)))
    small = draw.random() < 0.5  # memory: at most four layers, in the first part three

    def fits(part: int, start: int, stop: int) -> bool:
        return not small or stop - start <= (4 if part else 3)

    line = LayerChain(given, may_start, fits)
    every = [
        starts
        for starts in itertools.combinations(may_start, num_parts - 1)
        if all(fits(part, a, b) for part, (a, b) in enumerate(itertools.pairwise((0, *starts, 9))))
    ]
    if not every:
        with pytest.raises(PlanError, match="that fit"):
            best_consecutive(line, num_parts)
        return
    best_s = min(slowest(given.seconds, starts) for starts in every)
    found = best_consecutive(line, num_parts)
    assert found in every
    assert slowest(given.seconds, found) == pytest.approx(best_s)
    by_3 = algorithm_3_consecutive(line, num_parts)
    assert {*by_3} <= {*may_start}
    assert len(by_3) == num_parts - 1
    assert sorted({*by_3}) == [*by_3]
    if by_3 in every:
        assert slowest(given.seconds, by_3) >= best_s * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_a_repartition_is_never_worse_than_the_current_cuts(seed: int) -> None:
    draw = random.Random(seed)
    given, num_parts = graph(seed, 60), draw.randrange(2, 9)
    line = LayerChain(given)
    starts = tuple(sorted(draw.sample(range(1, 60), num_parts - 1)))
    found = repartition(line, starts)
    assert slowest(given.seconds, found) <= slowest(given.seconds, starts) * (1 + 1e-9)
    assert repartition(line, found) == found
    assert found == starts or slowest(given.seconds, found) < slowest(given.seconds, starts)


def test_a_repartition_follows_a_part_that_became_slow() -> None:
    given = TimedGraph((3.0,) * 4 + (1.0,) * 12, tuple((layer, layer + 1, 8) for layer in range(15)))
    assert repartition(LayerChain(given), (4, 8, 12)) == (2, 4, 10)


def test_of_balanced_cuts_the_one_that_sends_least_is_taken() -> None:
    links = [(layer, layer + 1, 1 if layer == 10 else 100) for layer in range(19)]
    given = TimedGraph((1.0,) * 20, tuple(links))
    assert algorithm_3_consecutive(LayerChain(given), 2, tolerance=0.05) == (10,)
    assert algorithm_3_consecutive(LayerChain(given), 2, tolerance=0.2) == (11,)


def test_a_repartition_fits_if_any_does() -> None:
    given = TimedGraph((1.0,) * 12, tuple((layer, layer + 1, 8) for layer in range(11)))
    line = LayerChain(given, fits=lambda part, start, stop: stop - start <= 3 + part)
    found = repartition(line, (4, 8))
    assert found == (3, 7)


def test_a_value_with_several_readers_crosses_once() -> None:
    given = TimedGraph((1.0,) * 4, ((0, 1, 5), (0, 3, 5), (1, 2, 7), (2, 3, 9)))
    assert LayerChain(given).passing_bytes[1:4] == (5, 12, 14)


def test_a_profile_as_a_graph() -> None:
    rows = chain(5, 0)
    given = timed_graph(rows)
    assert len(given) == 5
    assert given.seconds[4] == sum(row.forward_s + row.backward_s for row in rows[4:])
    assert given.edges[0] == (0, 1, 2 * rows[0].output_bytes)
    assert timed_graph(rows, [1.0] * 6).seconds == (1.0, 1.0, 1.0, 1.0, 2.0)


def test_too_many_parts_are_refused() -> None:
    with pytest.raises(PlanError, match="4 stages were asked for, but the model can be cut in 3"):
        repartition(LayerChain(graph(0, 9), may_start=(2, 5)), (1, 2, 3))
