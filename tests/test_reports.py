"""The reports' scripts run; on a part of what they are about, since the whole takes minutes."""

import pytest

from pipebench.planner.cost_models import COST_MODELS
from reports import planner_vs_simulator, table1_plans
from reports.planned_models import analytic, cluster
from tests.bench.planning import CASES, chain, seconds


def test_planner_vs_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    subject = analytic("alexnet", 256)
    assert subject is not None
    planner_vs_simulator.main([subject], [cluster("cluster-a", 1)])
    page = capsys.readouterr().out
    for text in (
        "## Under `overlap`",
        "## Under `sosp19`",
        "## Under `artifact`",
        "| alexnet | cluster-a | 2-1-1 (shape",
    ):
        assert text in page


def test_table1_plans(capsys: pytest.CaptureFixture[str]) -> None:
    row = table1_plans.Published("t1-alexnet-1x4A", "alexnet", "cluster-a", 1, 4, (3, 1), "3-1", 1.0)
    table1_plans.main([row], [COST_MODELS["artifact"]])
    assert "| alexnet-1x4A | analytic, 256 | 3-1 | 1.00 |" in capsys.readouterr().out


def test_table1_plans_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    table1_plans.main([])
    assert "so there is no table" in capsys.readouterr().out


def test_the_planners_bench_measures() -> None:
    assert all(value > 0 for value in seconds(chain(20, 0), "overlap", CASES[0].levels))
