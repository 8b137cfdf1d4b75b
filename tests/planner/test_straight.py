from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.planner.memory import StraightPlans
from tests.planner.problems import Case, cases


def fewest(case: Case, start: int) -> float:
    """Return the fewest stages from a state to the end of the model that fit, trying all."""
    last, rule = len(case.states) - 1, case.search.memory
    assert rule is not None
    if start == last:
        return 0
    found = [float("inf")]
    for stop in range(start + 1, last + 1):
        after = fewest(case, stop)
        if case.states.inside[start, stop] and after < float("inf"):
            before, behind = case.members(start), case.members(stop)
            if case.search.given.fits(before, behind, 1, Fraction(int(after)), rule):
                found.append(1 + after)
    return min(found)


@settings(max_examples=75, deadline=None)
@given(case=cases("sosp19", max_layers=6).filter(lambda case: case.memory is not None), num_workers=st.integers(1, 6))
def test_a_straight_plan_is_found_if_any_fits(case: Case, num_workers: int) -> None:
    """Also by a rule with another limit than the one that it was made for."""
    assert case.memory is not None
    straight = StraightPlans(case.work, num_workers, replace(case.memory, limit_bytes=0.0))
    assert straight.fits(case.memory) == (fewest(case, 0) <= num_workers)
