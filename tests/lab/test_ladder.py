import itertools

import pytest

from tests.lab.ladder import crossing, rungs, step_of


@pytest.mark.parametrize("where", [2e5, 3.7e7, 1e9])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_crossing_is_found_to_a_hundredth(where: float, sign: int) -> None:
    found = crossing(lambda bandwidth: sign * (bandwidth - where))
    assert found == pytest.approx(where, rel=0.011)


def test_a_lead_that_stays_has_no_crossing() -> None:
    assert crossing(lambda bandwidth: bandwidth) is None
    assert crossing(lambda bandwidth: -1.0) is None


def test_the_ladder_has_the_crossing_in_the_middle_of_its_middle_step() -> None:
    ladder = rungs(1e8)
    assert len(ladder) == 6
    assert ladder[2] * ladder[3] == pytest.approx(1e16, rel=0.01)
    assert [b / a for a, b in itertools.pairwise(ladder)] == pytest.approx([1.5] * 5, rel=0.01)
    assert all(float(f"{8 * rung:.3g}") == pytest.approx(8 * rung, rel=1e-12) for rung in ladder)  # three digits


def test_the_step_where_the_lead_changes() -> None:
    ladder = [1.0, 1.5, 2.25, 3.4, 5.1]
    assert step_of(ladder, [0.5, 0.2, -0.1, -0.3, -0.5]) == (1.5, 2.25)
    assert step_of(ladder, [-0.5, -0.2, -0.1, -0.3, 0.5]) == (3.4, 5.1)
    assert step_of(ladder, [0.5, 0.2, 0.1, 0.3, 0.5]) is None
    assert step_of(ladder, [0.5, -0.01, 0.01, -0.3, -0.5]) == (1.5, 2.25)  # noise around the crossing
