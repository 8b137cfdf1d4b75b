from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.planner.cost_models import StageGrid
from pipebench.planner.memory import MemoryRule
from pipebench.planner.states import prefixes
from pipebench.profile.model import LayerProfile
from tests.planner.problems import cases


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_replica_keeps_what_the_formula_says_and_the_fewest_that_fit_are_the_fewest(data: st.DataObject) -> None:
    case = data.draw(cases("sosp19").filter(lambda case: case.memory is not None))
    memory, rule, last = case.memory, case.search.memory, len(case.states) - 1
    assert memory is not None
    assert rule is not None
    for start in range(last):
        behind = np.array(
            [0.0 if stop == last else data.draw(st.integers(0, 40)) for stop in range(start + 1, last + 1)]
        )
        grid = StageGrid(case.work, np.array([start]), start + 1)
        least = memory.least(grid, behind)
        for stop in np.flatnonzero(case.states.inside[start]):
            before, after = case.members(start), case.members(int(stop))
            for in_flight in (1, 2, 5):
                expected = case.search.given.num_bytes(before, after, in_flight, rule)
                assert memory.num_bytes(case.states, start, int(stop), in_flight) == expected
            workers = int(behind[stop - start - 1])
            fitting = [m for m in range(1, 42) if case.search.given.fits(before, after, m, Fraction(workers), rule)]
            assert least[stop - start - 1] == min(fitting, default=np.inf)
            for m in (1, 2, 7):
                fits = memory.fits(grid, m, workers)[0, stop - start - 1]
                assert fits == case.search.given.fits(before, after, m, Fraction(workers), rule)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (MemoryRule(0), 3 * 100 + 100 + 3 * 30 + 2 * (7 + 5)),
        (MemoryRule(0, state_bytes_per_byte=2.0), 3 * 100 + 100 + 200 + 3 * 30 + 2 * (7 + 5)),
        (MemoryRule(0, versions=1), 100 + 100 + 3 * 30 + 2 * (7 + 5)),
        (MemoryRule(0, versions=2), 2 * 100 + 100 + 3 * 30 + 2 * (7 + 5)),
        (MemoryRule(0, recompute=True), 3 * 100 + 100 + 30 + 3 * 7 + 2 * (7 + 5)),
    ],
)
def test_three_minibatches_in_flight(rule: MemoryRule, expected: int) -> None:
    """Weights 100, kept for the backward 30, in 7, out 5."""
    rows = (
        LayerProfile("a", "Linear", 1, 1, 7, 7),
        LayerProfile("b", "Linear", 1, 1, 5, 5, (0,), parameter_sizes={"w": 100}, saved_bytes=30),
        LayerProfile("c", "Linear", 1, 1, 1, 1, (1,)),
        LayerProfile("loss", "loss", 0, 0, 0, 0, (2,)),
    )
    assert rule.num_bytes(prefixes(rows), 1, 2, 3) == expected


@pytest.mark.parametrize(
    ("m", "after", "expected"), [(1, 0, 1), (1, 3, 4), (2, 3, 3), (15, 1, 2), (4, 4, 2), (4, 5, 3)]
)
def test_minibatches_in_flight(m: int, after: int, expected: int) -> None:
    assert MemoryRule(0).depth(m, after) == expected
    assert MemoryRule(0, in_flight=2).depth(m, after) == 2
    assert MemoryRule(0, depth_at_most=2).depth(m, after) == min(2, expected)
