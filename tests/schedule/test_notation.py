import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipebench.errors import PlanError
from pipebench.schedule.modes import MODES
from pipebench.schedule.notation import format_plan, parse_plan


@pytest.mark.parametrize(
    ("plan", "mode", "workers", "replicas"),
    [
        ("15-1", "pipedream", 16, (15, 1)),
        ("2-1-1", "pipedream", 4, (2, 1, 1)),
        ("straight", "pipedream", 4, (1, 1, 1, 1)),
        ("16", "dp", 16, (16,)),
        (16, "dp", 16, (16,)),
        (2, "pipedream", 4, (2,)),
        ("1", "single", 4, (1,)),
        ("auto", "single", 4, (1,)),
        ("auto", "dp", 4, (4,)),
        ("1-1", "model", 4, (1, 1)),
    ],
)
def test_notation(plan: object, mode: str, workers: int, replicas: tuple[int, ...]) -> None:
    assert parse_plan(plan, MODES[mode], workers) == replicas


@pytest.mark.parametrize("plan", ["", "-", "1-", "01", "1--1", "0", -1, 1.5, None, True, [1], "1_0", "٣", "9" * 400])
def test_no_plan(plan: object) -> None:
    with pytest.raises(PlanError, match=r"^got .*allowed are auto, straight, or replicas per stage"):
        parse_plan(plan, MODES["pipedream"], 4)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_round_trip(replicas: list[int]) -> None:
    assert parse_plan(format_plan(replicas), MODES["pipedream"], sum(replicas)) == tuple(replicas)
