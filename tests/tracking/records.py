"""A result to record, and how MLflow's own client reads it."""

from pathlib import Path
from typing import Any

from pipebench.tracking.connection import default_uri
from pipebench.tracking.run_log import RunLog
from pipebench.train.result import REACHED, Point, RunResult

RESULT = RunResult(
    name="pipedream",
    mode="pipedream",
    plan="straight",
    engine="virtual",
    clock="virtual",
    timing="analytic V100",
    seed=0,
    outcome=REACHED,
    sentence="reached top1 95% after 3 epochs",
    metrics={"time_to_accuracy_s": 4.5, "total_time_s": 6.0, "comm_bytes_total": 1e9, "best_top1": 0.96},
    points=tuple(
        Point(samples=1000 * (i + 1), clock_s=1.5 * (i + 1), metrics={"train_loss": loss, "top1": top1})
        for i, (loss, top1) in enumerate([(2.0, 0.5), (0.5, 0.8), (0.25, 0.96), (0.75, 0.9)])
    ),
    stages=({"index": 0, "peak_memory_bytes": 100, "samples_per_update": 32}, {"index": 1, "peak_memory_bytes": 60}),
)


def fetch(run: RunLog) -> Any:
    """Return the run as MLflow's own client reads it."""
    from mlflow.tracking import MlflowClient

    assert run.run_id is not None
    return MlflowClient(default_uri()).get_run(run.run_id)


def history(run: RunLog, metric: str) -> list[Any]:
    from mlflow.tracking import MlflowClient

    assert run.run_id is not None
    rows = MlflowClient(default_uri()).get_metric_history(run.run_id, metric)
    return sorted(rows, key=lambda row: int(row.step))


def rescued(folder: Path, name: str) -> Path:
    return folder / "pipebench-results" / f"{name}-1"
