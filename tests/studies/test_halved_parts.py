"""Kernighan-Lin and Algorithm 3 on graphs small enough to look at all halves."""

import itertools
import random

import pytest

from pipebench.planner.partition import TOLERANCE, TimedGraph
from reports.studies.halved_parts import Parts, algorithm_3, plain
from reports.studies.kernighan_lin import Balance, Halves, exchanged, seconds_of
from tests.planner.test_partition import SEEDS, crossing, graph, off_s


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


def test_exchanges_are_mostly_as_good_as_the_best_halves() -> None:
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
    """Each exchange alone gains, and no chosen one loses: the first example of Kernighan and Lin's kind."""
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


@pytest.mark.sampled(4)
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
    assert max(seconds_of(given, part) for part in found.parts) <= part_s + slack_s
    assert given.cut_bytes(found.part_of) == sum(
        num_bytes for a, b, num_bytes in given.edges if found.part_of[a] != found.part_of[b]
    )
    assert ways(given, num_parts) == found


def test_algorithm_3_cuts_as_little_as_plain_exchanges_with_less_work() -> None:
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
