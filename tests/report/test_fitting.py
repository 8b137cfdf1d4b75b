"""Fits find the constants of a known formula; leaving a cell out equals a fit without it."""

import math
from collections.abc import Mapping

import pytest

from pipebench.report.fitting import Cell, Error, Sought, fit, left_out

TRUE = {"ring": 2.7, "flow": 0.44}
# A cell's value is (its constants)^-power, times an unexplained factor.
POWERS: Mapping[Cell, Mapping[str, float]] = {
    ("a", "x"): {"ring": 1.0},
    ("b", "x"): {"ring": 0.5},
    ("c", "x"): {"flow": 1.0, "ring": 0.2},
    ("d", "x"): {"flow": 0.8},
}


def error_with(factors: Mapping[str, float]) -> Error:
    """Return the error of a cell whose published value is that of the true constants times its row's factor."""

    def error(values: Mapping[str, float], cell: Cell) -> float:
        made, published = (
            math.prod(each[name] ** -power for name, power in POWERS[cell].items()) for each in (values, TRUE)
        )
        return math.log(made / (published * factors.get(cell[0], 1.0)))

    return error


SOUGHT = [Sought("ring", 0.1, 30.0, (("a", "x"), ("b", "x"))), Sought("flow", 0.01, 5.0, (("c", "x"), ("d", "x")))]


@pytest.mark.parametrize("start", [{"ring": 0.2, "flow": 4.0}, {"ring": 25.0, "flow": 0.02}, dict(TRUE)])
def test_constants_that_made_the_cells_are_found(start: dict[str, float]) -> None:
    assert fit(SOUGHT, error_with({}), start) == {name: pytest.approx(value, rel=0.01) for name, value in TRUE.items()}


def test_disagreeing_cells_are_fitted_by_least_squares_of_logarithms() -> None:
    """Ln ring from a with weight 1 (power 1), from b with weight 1/4 (power 1/2, squared)."""
    found = fit(SOUGHT[:1], error_with({"a": 1.2, "b": 0.9}), {"ring": 1.0, "flow": 1.0})
    shift = (-math.log(1.2) * 1.0 - math.log(0.9) * 0.5) / (1.0 + 0.25)
    assert found["ring"] == pytest.approx(TRUE["ring"] * math.exp(shift), rel=0.01)
    assert found["flow"] == 1.0


def test_leaving_a_cell_out_predicts_it_from_the_others() -> None:
    """Without a, b alone gives ring: 0.9^-2 as much, which a meets with the power 1; and the other way round."""
    error = error_with({"a": 1.2, "b": 0.9})
    found = left_out(SOUGHT, error, fit(SOUGHT, error, {"ring": 1.0, "flow": 1.0}))
    assert found[("a", "x")] == pytest.approx(2 * math.log(0.9) - math.log(1.2), abs=0.01)
    assert found[("b", "x")] == pytest.approx(math.log(1.2) / 2 - math.log(0.9), abs=0.01)
    assert [*found] == [cell for each in SOUGHT for cell in each.cells]


def test_the_only_cell_of_a_constant_cannot_be_left_out() -> None:
    alone = [Sought("ring", 0.1, 30.0, (("a", "x"),)), SOUGHT[1]]
    found = left_out(alone, error_with({}), TRUE)
    assert found[("a", "x")] is None
    assert found[("c", "x")] == pytest.approx(0.0, abs=0.01)


def test_a_start_where_the_error_is_constant_is_left() -> None:
    """Above 1 the port is the limit; the start lies there."""

    def error(values: Mapping[str, float], cell: Cell) -> float:
        return -math.log(min(values["ring"], 1.0) / 0.5)

    found = fit([Sought("ring", 0.05, 20.0, (("a", "x"),))], error, {"ring": 15.0})
    assert found["ring"] == pytest.approx(0.5, rel=0.01)


def test_a_constant_stays_within_its_bounds() -> None:
    found = fit([Sought("ring", 3.0, 30.0, (("a", "x"),))], error_with({}), {"ring": 20.0, "flow": 1.0})
    assert found["ring"] == pytest.approx(3.0, rel=0.01)
