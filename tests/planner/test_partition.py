"""Kernighan-Lin and Algorithm 3 against all there is to choose from, on graphs small enough to look at all of it."""

import itertools
import random
from collections.abc import Sequence

import pytest

from pipebench.errors import PlanError
from pipebench.planner.partition.coarsen import NODES_PER_PART, coarsen
from pipebench.planner.partition.consecutive import Line, algorithm_3_consecutive, best_consecutive, repartition
from pipebench.planner.partition.graph import TimedGraph, timed_graph
from pipebench.planner.partition.kernighan_lin import Balance, Halves, exchanged
from pipebench.planner.partition.parts import TOLERANCE, Parts, algorithm_3, plain
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
    """Return the bytes of edges with one end among some layers, told once more."""
    inside = {*left}
    return sum(num_bytes for a, b, num_bytes in given.edges if (a in inside) != (b in inside))


def off_s(given: TimedGraph, left: Sequence[int], target_s: float) -> float:
    return abs(sum(given.seconds[layer] for layer in left) - target_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_exchanges_never_lose_and_keep_the_balance(seed: int) -> None:
    given = graph(seed, 11)
    order = [*range(11)]
    random.Random(seed).shuffle(order)
    start = Halves(tuple(sorted(order[:5])), tuple(sorted(order[5:])))
    balance = Balance(sum(given.seconds) / 2, 0.1 * sum(given.seconds), (2, 1))
    found = exchanged(given, start, balance)
    assert sorted((*found.left, *found.right)) == [*range(11)]
    assert len(found.left) >= 2
    assert len(found.right) >= 1
    assert crossing(given, found.left) <= crossing(given, start.left)
    slack_s = max(balance.slack_s, off_s(given, start.left, balance.left_s))
    assert off_s(given, found.left, balance.left_s) <= slack_s * (1 + 1e-6)
    least = min(
        crossing(given, left)
        for size in range(2, 11)
        for left in itertools.combinations(range(11), size)
        if off_s(given, left, balance.left_s) <= slack_s * (1 + 1e-6)
    )
    assert least <= crossing(given, found.left)
    assert crossing(given, exchanged(given, found, balance).left) <= crossing(given, found.left)


def test_exchanges_are_mostly_as_good_as_the_best_halves_there_are() -> None:
    found, best = 0, 0
    for seed in SEEDS:
        given = graph(seed, 10)
        balance = Balance(sum(given.seconds) / 2, 0.2 * sum(given.seconds))
        halves = exchanged(given, Halves((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)), balance)
        slack_s = max(balance.slack_s, off_s(given, range(5), balance.left_s)) * (1 + 1e-6)
        choices = (left for size in range(1, 10) for left in itertools.combinations(range(10), size))
        found += crossing(given, halves.left)
        best += min(crossing(given, left) for left in choices if off_s(given, left, balance.left_s) <= slack_s)
    assert best <= found <= 1.1 * best


def test_exchanges_separate_two_groups_that_were_mixed() -> None:
    """Each exchange alone gains, and none that is kept loses: the first example of Kernighan and Lin's kind."""
    pairs = [*itertools.combinations((0, 2, 4, 6), 2), *itertools.combinations((1, 3, 5, 7), 2)]
    given = TimedGraph((1.0,) * 8, (*((a, b, 10) for a, b in pairs), (6, 7, 1)))
    halves = exchanged(given, Halves((0, 1, 2, 3), (4, 5, 6, 7)), Balance(4.0, 0.0, (1, 1)))
    assert {halves.left, halves.right} == {(0, 2, 4, 6), (1, 3, 5, 7)}


def test_a_pass_goes_through_exchanges_that_lose() -> None:
    """A boundary inside a block of heavy edges moves out of it, one layer after the other."""
    heavy = [10, 10, 10, 1, 10, 10, 10]
    given = TimedGraph((1.0,) * 8, tuple((a, a + 1, num_bytes) for a, num_bytes in enumerate(heavy)))
    halves = exchanged(given, Halves((0,), (1, 2, 3, 4, 5, 6, 7)), Balance(4.0, 3.0))
    assert (halves.left, halves.right) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("ways", [plain, algorithm_3])
@pytest.mark.parametrize("seed", range(20))
def test_parts_hold_every_layer_once_and_are_balanced(ways: object, seed: int) -> None:
    assert callable(ways)
    draw = random.Random(seed)
    num_layers = draw.randrange(40, 200)
    given, num_parts = graph(seed, num_layers), draw.randrange(2, 17)
    found: Parts = ways(given, num_parts)
    assert sorted(itertools.chain(*found.parts)) == [*range(num_layers)]
    assert len(found.parts) == num_parts
    assert all(found.parts)
    part_s = sum(given.seconds) / num_parts
    # Every halving may be off by the slack, or by half of a layer where none can be cut: at most log2 of them.
    slack_s = (TOLERANCE * part_s + max(given.seconds)) * (num_parts - 1).bit_length()
    assert max(given.time(part) for part in found.parts) <= part_s + slack_s
    assert given.cut_bytes(found.part_of) == sum(
        num_bytes for a, b, num_bytes in given.edges if found.part_of[a] != found.part_of[b]
    )
    assert ways(given, num_parts) == found


def test_algorithm_3_cuts_what_plain_exchanges_cut_in_less_work() -> None:
    """Residual blocks of equal time: between them one value crosses, inside a block two."""
    edges, seconds = [], [1.0]
    for _ in range(64):
        begin = len(seconds) - 1
        seconds += [1.0] * 10
        edges += [(layer, layer + 1, 8) for layer in range(begin, begin + 10)] + [(begin, begin + 10, 8)]
    given = TimedGraph(tuple(seconds), tuple(edges))
    by_plain, by_3 = plain(given, 16), algorithm_3(given, 16)
    assert by_3.coarse is not None
    assert len(by_3.coarse.graph) < len(given) / 3
    assert given.cut_bytes(by_3.part_of) == given.cut_bytes(by_plain.part_of) == 15 * 16


@pytest.mark.parametrize("seed", range(20))
def test_a_coarse_graph_costs_what_its_layers_do(seed: int) -> None:
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
    """A node holds two layers here. Were they merged, too, those would be merged first that a sparse edge passes by."""
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
def test_the_best_consecutive_parts_are_those_of_all_there_are(seed: int) -> None:
    draw = random.Random(seed)
    given, num_parts = graph(seed, 9), draw.randrange(1, 6)
    may_start = sorted(draw.sample(range(1, 9), draw.randrange(num_parts - 1, 9)))
    small = draw.random() < 0.5  # memory: at most four layers, in the first part three

    def fits(part: int, start: int, stop: int) -> bool:
        return not small or stop - start <= (4 if part else 3)

    line = Line(given, may_start, fits)
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
def test_a_repartition_is_never_worse_than_what_there_was(seed: int) -> None:
    draw = random.Random(seed)
    given, num_parts = graph(seed, 60), draw.randrange(2, 9)
    line = Line(given)
    starts = tuple(sorted(draw.sample(range(1, 60), num_parts - 1)))
    found = repartition(line, starts)
    assert slowest(given.seconds, found) <= slowest(given.seconds, starts) * (1 + 1e-9)
    assert repartition(line, found) == found
    assert found == starts or slowest(given.seconds, found) < slowest(given.seconds, starts)


def test_a_repartition_follows_a_part_that_became_slow() -> None:
    given = TimedGraph((3.0,) * 4 + (1.0,) * 12, tuple((layer, layer + 1, 8) for layer in range(15)))
    assert repartition(Line(given), (4, 8, 12)) == (2, 4, 10)


def test_of_balanced_cuts_the_one_that_sends_least_is_taken() -> None:
    links = [(layer, layer + 1, 1 if layer == 10 else 100) for layer in range(19)]
    given = TimedGraph((1.0,) * 20, tuple(links))
    assert algorithm_3_consecutive(Line(given), 2, tolerance=0.05) == (10,)
    assert algorithm_3_consecutive(Line(given), 2, tolerance=0.2) == (11,)


def test_a_repartition_fits_if_any_does() -> None:
    given = TimedGraph((1.0,) * 12, tuple((layer, layer + 1, 8) for layer in range(11)))
    line = Line(given, fits=lambda part, start, stop: stop - start <= 3 + part)
    found = repartition(line, (4, 8))
    assert found == (3, 7)


def test_a_value_with_several_readers_crosses_once() -> None:
    given = TimedGraph((1.0,) * 4, ((0, 1, 5), (0, 3, 5), (1, 2, 7), (2, 3, 9)))
    assert Line(given).passing_bytes[1:4] == (5, 12, 14)


def test_a_profile_as_a_graph() -> None:
    rows = chain(5, 0)
    given = timed_graph(rows)
    assert len(given) == 5
    assert given.seconds[4] == sum(row.forward_s + row.backward_s for row in rows[4:])
    assert given.edges[0] == (0, 1, 2 * rows[0].output_bytes)
    assert timed_graph(rows, [1.0] * 6).seconds == (1.0, 1.0, 1.0, 1.0, 2.0)


def test_too_many_parts_are_refused() -> None:
    with pytest.raises(PlanError, match="4 stages were asked for, but the model can be cut in 3"):
        repartition(Line(graph(0, 9), may_start=(2, 5)), (1, 2, 3))
