"""Medians known well enough: intervals against a table and simulation, the stop rule on samples of known medians."""

import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest

from pipebench.profile.enough import StopRule, median_interval, uncertainty

# Of n samples, the ranks that enclose the median with at least 95%: Le Boudec's table (2010, appendix A).
RANKS = {6: (1, 6), 8: (1, 8), 9: (2, 8), 12: (3, 10), 20: (6, 15), 25: (8, 18), 50: (18, 33), 70: (27, 44)}
DRAWS: dict[str, tuple[Callable[[random.Random], float], float]] = {  # a draw, and the median of such
    "normal": (lambda drawn: drawn.gauss(1.0, 0.1), 1.0),
    "lognormal": (lambda drawn: drawn.lognormvariate(0.0, 0.5), 1.0),
    "pareto, without a mean": (lambda drawn: drawn.paretovariate(0.9), 2 ** (1 / 0.9)),
    "two humps": (lambda drawn: drawn.choice((0.5, 0.9, 1.0, 1.1, 20.0)), 1.0),
}


@pytest.mark.parametrize("count", RANKS)
def test_ranks_equal_the_table_s(count: int) -> None:
    samples = list(range(1, count + 1))
    random.Random(count).shuffle(samples)
    assert median_interval(samples) == RANKS[count]


@pytest.mark.parametrize("count", range(6))
def test_too_few_samples_have_no_interval(count: int) -> None:
    assert median_interval([1.0] * count) == (-math.inf, math.inf)
    if count:
        assert uncertainty([[1.0] * count]) == math.inf


@pytest.mark.parametrize("name", DRAWS)
def test_intervals_contain_the_median_as_often_as_stated(name: str) -> None:
    draw, median = DRAWS[name]
    drawn = random.Random(7)
    for count in (6, 11, 25):
        inside = 0
        for _ in range(1000):
            low, high = median_interval([draw(drawn) for _ in range(count)])
            inside += low <= median <= high
        assert inside >= 940, count  # 950 are expected at least, and three standard deviations are 21


@pytest.mark.parametrize("name", DRAWS)
def test_stopping_at_a_narrow_interval_seldom_misses_the_median(name: str) -> None:
    """Checking after every sample lowers the confidence: to nine in ten, as the rule's docstring says."""
    draw, median = DRAWS[name]
    drawn, rule, inside, counts = random.Random(11), StopRule(within=0.15, most=60), 0, set()
    for _ in range(1000):
        samples: list[float] = []
        while not rule.is_met([samples], 0.0):
            samples.append(draw(drawn))
        low, high = median_interval(samples)
        inside += low <= median <= high
        counts.add(len(samples))
    assert inside >= 890
    assert 6 <= min(counts) <= max(counts) <= 60


def repetitions(rule: StopRule, draw: Callable[[int], float], each_s: float = 0.0) -> int:
    """Return how often a rule has something measured."""
    samples: list[float] = []
    for count in itertools.count():
        if rule.is_met([samples], count * each_s):
            return count
        samples.append(draw(count))
    raise AssertionError


def test_constant_times_take_the_fewest_samples() -> None:
    assert repetitions(StopRule(least=8), lambda _: 3.0) == 8


def test_varying_times_take_more_samples_up_to_the_limit() -> None:
    assert repetitions(StopRule(), lambda k: 1.0 + 0.01 * (k % 3)) == 6
    assert 6 < repetitions(StopRule(), lambda k: 1.0 + (0.2 if k % 6 == 0 else 0.01 * (k % 3))) < 15
    assert repetitions(StopRule(), lambda k: 2.0 ** (k % 9)) == 15


def test_outliers_do_not_delay_the_end() -> None:
    """One in five takes a hundred times as long: the mean would need hundreds of samples, the median doesn't."""
    assert repetitions(StopRule(), lambda k: 100.0 if k % 5 == 4 else 1.0 + 0.01 * (k % 2)) < 12


def test_the_time_limit_ends_all_but_the_fewest_samples() -> None:
    varies = lambda k: 2.0 ** (k % 9)  # noqa: E731
    assert repetitions(StopRule(most_s=10.0), varies, 1.0) == 10
    assert repetitions(StopRule(most_s=10.0), varies, 6.0) == 3
    assert repetitions(StopRule(most_s=10.0), varies, 15.0) == 2
    assert repetitions(StopRule(most_s=10.0), varies, 60.0) == 1
    assert repetitions(StopRule(least_s=1.2), lambda _: 3.0, 0.1) == 12
    assert repetitions(StopRule(least_s=2.0, most=9), lambda _: 3.0, 0.1) == 9


def test_quantities_count_by_their_share_of_the_sum() -> None:
    steady, wild = [1000.0] * 6, [1.0, 30.0, 2.0, 9.0, 4.0, 8.0]
    assert uncertainty([wild]) > 2
    assert uncertainty([steady, wild]) == pytest.approx((30 - 1) / 2 / (1000 + statistics.median(wild)))
    assert StopRule().is_met([steady, wild], 0.0)
    assert not StopRule().is_met([wild], 0.0)
    assert not StopRule().is_met([steady, wild[:5]], 0.0)


def test_nothing_to_measure_is_enough() -> None:
    assert StopRule().is_met([], 0.0)
    assert uncertainty([]) == 0
    assert uncertainty([[0.0] * 6]) == 0
