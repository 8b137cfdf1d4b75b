"""The list of metrics: every number of a run has a row, and rows agree with what the package counts."""

import json
from dataclasses import replace

import pytest

from pipebench.metrics import COLUMN, METRICS, RATE, SECONDS, SHARE, STAGE_METRICS, known, warn_of_unlisted
from pipebench.report.metrics import metric_problem, value_of
from pipebench.simulate.timeline import BUFFERS, EVALUATION, TRAINING_KINDS
from pipebench.tracking.entries import logged_metrics
from pipebench.train.result import COMPLETED, MISSED, RunResult
from pipebench.typed_json import read, write
from tests.results import DP


@pytest.mark.parametrize("kind", TRAINING_KINDS)
def test_bytes_of_every_kind_have_rows(kind: str) -> None:
    name = kind.replace("-", "_")
    rows = known(f"comm_bytes_{name}"), known(f"comm_bytes_per_sample_{name}")
    assert [row is not None and row.name.endswith(name) for row in rows] == [True, True]


@pytest.mark.parametrize("kind", [BUFFERS, EVALUATION])
def test_bytes_that_are_counted_separately_have_rows(kind: str) -> None:
    assert known(f"comm_bytes_{kind}")


def test_names_end_in_their_units() -> None:
    for row in (*METRICS, *STAGE_METRICS):
        assert (row.unit == SECONDS) == (row.name.endswith("_s") and not row.name.endswith("_per_s")) or "*" in row.name
        assert (row.unit == RATE) == row.name.endswith("_samples_per_s")
        assert (row.unit == SHARE) == row.name.endswith(("_fraction", "_error"))


def test_no_metric_has_two_rows() -> None:
    assert len({row.name for row in METRICS}) == len(METRICS)
    assert len({row.name for row in STAGE_METRICS}) == len(STAGE_METRICS)


def test_whether_the_target_was_reached_is_a_metric_of_every_result_also_of_older_ones() -> None:
    assert json.loads(write(DP))["metrics"]["target_reached"] == 1.0
    older = json.loads(write(DP))
    del older["metrics"]["target_reached"]
    assert value_of(read(RunResult, json.dumps(older).encode()), "target_reached") == 1.0
    assert value_of(replace(DP, outcome=MISSED), "target_reached") == 0.0
    assert "target_reached" not in replace(DP, outcome=COMPLETED).metrics


def test_a_metric_without_a_row_is_reported() -> None:
    warn_of_unlisted(["epoch_time_s", "best_top1", "comm_bytes_level_network"])
    with pytest.warns(UserWarning, match=r"without a row in pipebench/metrics.py: gpu_hours$"):
        warn_of_unlisted(["epoch_time_s", "gpu_hours"])


def test_a_new_metric_needs_only_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's table, reports and the check read the list: no other file is changed for a metric."""
    from pipebench import metrics
    from pipebench.report import metrics as of_reports
    from pipebench.tracking import entries

    assert "unknown metric" in str(metric_problem("gpu_hours", "virtual"))
    rows = (*METRICS, metrics.Metric("gpu_hours", "h", metrics.LOWER, metrics.ALL, "workers times hours", COLUMN))
    monkeypatch.setattr(metrics, "METRICS", rows)
    monkeypatch.setattr(of_reports, "METRICS", rows)
    monkeypatch.setattr(entries, "_METRICS", tuple(row.name for row in rows if COLUMN in row.shown))
    assert metric_problem("gpu_hours", "virtual") is None
    warn_of_unlisted(["gpu_hours"])
    assert logged_metrics(replace(DP, outcome=COMPLETED, metrics={"gpu_hours": 2.0})) == {"gpu_hours": 2.0}
