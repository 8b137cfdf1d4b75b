import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.cluster import Level
from pipebench.planner.cost_models import Inner, StageGrid, StageTerms, Term
from tests.oracles import planning
from tests.planner.problems import MODELS, cases, levels, link

MOST = 200
NUMBERS = st.one_of(
    st.just(0.0), st.integers(1, 9).map(float), st.floats(-6, 6).map(lambda power: 10**power), st.floats(0.1, 10.0)
)


def _term_s(numbers: tuple[float, float, float], m: int) -> float:
    base, sync, tail = numbers
    return (base + sync * (m - 1) / m) / m + tail * (m - 1) / m


def _check_least(seconds: list[float], limit_s: float, at_least: int, least: float) -> None:
    """Compare with trying every m; a limit within rounding of a time may go either way."""
    near = 1e-12 * limit_s
    clear = [m for m in range(at_least, MOST + 1) if seconds[m] <= limit_s - near]
    assert least >= at_least
    assert least == math.inf or least == int(least)
    if limit_s == 0.0:
        assert least == next((m for m in range(at_least, MOST + 1) if seconds[m] == 0.0), least)
    elif least <= MOST:
        assert seconds[int(least)] <= limit_s + near
        assert not [m for m in clear if m < least]
    else:
        assert not clear


@st.composite
def _searches(draw: Any, num_terms: int) -> tuple[list[tuple[float, float, float]], float, int]:
    terms = [(draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)) for _ in range(num_terms)]
    # Limits far off, near the level at which a slope changes its sign, and equal to some m's time.
    m = draw(st.integers(1, MOST))
    exact = max(_term_s(each, m) for each in terms)
    limit_s = draw(st.one_of(NUMBERS, st.just(exact), st.sampled_from([each[2] for each in terms])))
    return terms, limit_s * draw(st.sampled_from([1.0, 1.0, 1 - 1e-6, 1 + 1e-6])), draw(st.integers(1, 40))


@settings(max_examples=200, deadline=None)
@given(search=_searches(1))
def test_the_least_replicas_of_a_term_equal_a_search_s(
    search: tuple[list[tuple[float, float, float]], float, int],
) -> None:
    (numbers,), limit_s, at_least = search
    seconds = [math.inf, *(_term_s(numbers, m) for m in range(1, MOST + 1))]
    term = Term(*(np.array([number]) for number in numbers))
    least = float(term.least(limit_s, float(at_least))[0])
    _check_least(seconds, limit_s, at_least, math.inf if least >= 1e15 else least)
    shared = Term(np.array([numbers[0]]))
    least = float(shared.least(limit_s, float(at_least))[0])
    base = [math.inf, *(numbers[0] / m for m in range(1, MOST + 1))]
    _check_least(base, limit_s, at_least, math.inf if least >= 1e15 else least)


@settings(max_examples=100, deadline=None)
@given(search=_searches(3), fixed=st.sampled_from([0.0, 0.0, 0.5]))
def test_the_least_replicas_of_several_terms_satisfy_all(
    search: tuple[list[tuple[float, float, float]], float, int], fixed: float
) -> None:
    (shared, *others), limit_s, at_least = search
    shared = (shared[0], 0.0, 0.0)
    terms = [Term(np.array([shared[0]])), *(Term(*(np.array([number]) for number in numbers)) for numbers in others)]
    seconds = [
        math.inf,
        *(max(fixed, *(_term_s(numbers, m) for numbers in (shared, *others))) for m in range(1, MOST + 1)),
    ]
    stage = StageTerms(tuple(terms), np.array([fixed]))
    _check_least(seconds, limit_s, at_least, float(stage.least(limit_s, float(at_least))[0]))
    for m in (1, 7, MOST):
        assert float(stage.seconds(float(m))[0]) == pytest.approx(seconds[m], rel=1e-12)


def test_a_slow_sum_does_not_hide_what_one_replica_computes() -> None:
    """In base + sync the base is lost when the sum takes 1e13 times as long."""
    term = Term(np.array([1e-6]), np.array([1e7]))
    assert term.least(1e-6 * (1 - 1e-5), 1.0)[0] > 1e11
    assert term.least(1e-6, 1.0)[0] == 1.0


def test_replicas_that_one_term_asks_for_may_be_too_many_for_a_term_before_it() -> None:
    """8 (m-1) / m^2 is 0, 2, 1.78, 1.5 with 1 to 4 replicas."""
    stage = StageTerms((Term(np.array([0.0]), np.array([8.0])), Term(np.array([3.0]), np.array([0.0]))))
    assert stage.least(1.6)[0] == 4.0


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_stage_costs_what_the_formulas_give(model: str, data: st.DataObject) -> None:
    case = data.draw(cases(model))
    level = data.draw(levels(4))
    grid = StageGrid(case.work, np.arange(len(case.states) - 1))
    for first in (False, True):
        for expected_inner in (None, planning.Inner(0.125, 3)):
            inner = None if expected_inner is None else Inner(np.full((1, 1), 0.125), 3)
            terms = case.model.terms(grid, level, first=first, inner=inner)
            for m in (1, 2, 5):
                seconds = np.broadcast_to(terms.seconds(float(m)), (len(case.states) - 1, len(case.states)))
                for start, stop in zip(*np.nonzero(case.states.inside), strict=True):
                    if start == 0 and not first:  # always the first of its pipeline
                        continue
                    expected = case.search.given.stage_s(
                        case.members(start), case.members(stop), m, link(level), first=first, inner=expected_inner
                    )
                    assert seconds[start, stop] == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("model", ["sosp19", "artifact"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_parts_of_a_stage_s_time_add_up(model: str, data: st.DataObject) -> None:
    """SOSP'19 section 3.1 overlaps computing and summing; the published optimizer adds them."""
    case, level, m = data.draw(cases(model)), data.draw(levels(4)), data.draw(st.integers(1, 5))
    last = len(case.states) - 1
    compute_s, sum_s, _ = case.model.parts(case.work, level, 0, last, m)
    whole = case.members(0), case.members(last)
    expected_s = case.search.given.stage_s(*whole, m, link(level), first=True, inner=None)
    found_s = max(compute_s, sum_s) if model == "sosp19" else compute_s + sum_s
    assert found_s == pytest.approx(expected_s, rel=1e-9, abs=1e-15)


def test_latency_alone_stops_replication_from_paying() -> None:
    """Term.tail: a ring of very many replicas waits for 2 (m-1) messages per round."""
    level = Level("level", 1000, 1e15, 1e-3)
    term = Term(np.array([1.0]), np.array([0.0]), np.array([2 * level.latency_s]))
    assert term.least(2.1e-3, 1.0)[0] < 1e15
    assert term.least(1.9e-3, 1.0)[0] >= 1e15
