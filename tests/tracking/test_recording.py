"""Runs recorded in a real SQLite store."""

import json
import math
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipebench.errors import UserError
from pipebench.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult
from pipebench.tracking import RunLog, Tracking, default_uri, open_ui, summarise_curves, summarise_seeds
from pipebench.tracking.store import Store
from pipebench.tracking.ui import choose_port
from tests.tracking.records import RESULT, fetch, history


@pytest.fixture(scope="module")
def finished(tracking: Tracking) -> RunLog:
    """One run as the runner records it, with a parent, long params and a point that is not finite."""
    parent = tracking.start("comparison", params={}, tags={})
    run = tracking.start(
        "pipedream",
        params={"train.minibatch_size": "32", "notes": "x" * 7000},
        tags={"mode": "pipedream"},
        parent=parent,
        clock_scale=1000.0,
    )
    for point in RESULT.points:
        run.point(point)
    run.point(Point(5000, 6.0, {"train_loss": math.nan, "top1": 0.9}))
    run.text("plan/plan.txt", "straight")
    run.finish(RESULT)
    parent.metrics(summarise_seeds([RESULT, RESULT]))
    parent.finish(None, status="FINISHED")
    return run


def comparison_of(run: RunLog) -> RunLog:
    parent = run._start.parent
    assert isinstance(parent, RunLog)
    return parent


def test_curves_have_samples_as_steps_and_the_scaled_clock_as_time(finished: RunLog) -> None:
    run = fetch(finished)
    rows = history(finished, "top1")
    assert [row.step for row in rows] == [1000, 2000, 3000, 4000, 5000]
    assert [row.timestamp - run.info.start_time for row in rows] == [1_500_000, 3_000_000, 4_500_000] + 2 * [6_000_000]
    assert [row.value for row in history(finished, "virtual_time_s")] == [1.5, 3.0, 4.5, 6.0, 6.0]
    assert run.data.tags["clock_scale"] == "1000"
    assert run.info.end_time - run.info.start_time == 6_000_000


def test_best_and_final_values_are_metrics_of_their_own(finished: RunLog) -> None:
    metrics = fetch(finished).data.metrics
    assert (metrics["best_top1"], metrics["final_top1"]) == (0.96, 0.9)
    assert (metrics["best_train_loss"], metrics["final_train_loss"]) == (0.25, 0.75)
    assert metrics["time_to_accuracy_s"] == 4.5
    assert "best_virtual_time_s" not in metrics


def test_each_stage_has_its_memory(finished: RunLog) -> None:
    metrics = fetch(finished).data.metrics
    assert metrics["peak_memory_bytes/stage_0"] == 100
    assert metrics["peak_memory_bytes/stage_1"] == 60
    assert metrics["samples_per_update/stage_0"] == 32


def test_outcome_status_and_parent(finished: RunLog) -> None:
    run = fetch(finished)
    assert run.info.status == "FINISHED"
    assert run.data.tags["outcome"] == REACHED
    assert run.data.tags["mode"] == "pipedream"
    assert run.data.tags["mlflow.parentRunId"] == comparison_of(finished).run_id


def test_a_value_that_is_not_finite_becomes_a_tag(finished: RunLog) -> None:
    run = fetch(finished)
    assert run.data.tags["non_finite.train_loss"] == "nan at 5000 samples"
    assert len(history(finished, "train_loss")) == 4


def test_a_long_param_is_cut_and_kept_whole_as_an_artifact(finished: RunLog, folder: Path) -> None:
    run = fetch(finished)
    assert run.data.params["train.minibatch_size"] == "32"
    assert len(run.data.params["notes"]) == 6000
    artifacts = folder / "mlartifacts" / "suite" / str(finished.run_id) / "artifacts"
    assert json.loads((artifacts / "params.json").read_text())["notes"] == "x" * 7000
    assert (artifacts / "plan" / "plan.txt").read_text() == "straight"
    assert RunResult.from_json((artifacts / "result.json").read_text()) == RESULT


def test_the_parent_has_mean_and_spread(finished: RunLog) -> None:
    metrics = fetch(comparison_of(finished)).data.metrics
    assert (metrics["time_to_accuracy_s_mean"], metrics["time_to_accuracy_s_std"]) == (4.5, 0.0)
    assert (metrics["runs_reached"], metrics["runs_total"]) == (2, 2)


def test_the_user_is_told_how_to_open_the_run(finished: RunLog) -> None:
    assert finished.where() == "pipebench ui   (experiment suite, run pipedream)"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(DIVERGED, "FAILED"), (INTERRUPTED, "KILLED"), (MISSED, "FINISHED"), (COMPLETED, "FINISHED")],
)
def test_the_outcome_decides_the_status(tracking: Tracking, outcome: str, status: str) -> None:
    run = tracking.start(outcome, params={}, tags={})
    run.finish(replace(RESULT, outcome=outcome))
    assert (fetch(run).info.status, fetch(run).data.tags["outcome"]) == (status, outcome)


def test_an_interrupted_run_keeps_what_it_logged(tracking: Tracking) -> None:
    run = tracking.start("interrupted", params={}, tags={})
    run.point(RESULT.points[0])
    run.finish(None, status="KILLED")
    assert fetch(run).info.status == "KILLED"
    assert [row.value for row in history(run, "top1")] == [0.5]


def test_a_wall_clock_run_ends_now_and_has_no_virtual_time(tracking: Tracking) -> None:
    run = tracking.start("wall", params={}, tags={}, virtual=False)
    run.point(RESULT.points[0])
    run.finish(RESULT)
    assert abs(fetch(run).info.end_time - time.time() * 1000) < 60_000
    assert "virtual_time_s" not in fetch(run).data.metrics


def test_more_values_than_one_request_takes(tracking: Tracking) -> None:
    run = tracking.start("long", params={f"key{i}": str(i) for i in range(150)}, tags={})
    for i in range(1200):
        run.point(Point(i, float(i), {"train_loss": 1.0}))
    run.finish(None, status="FINISHED")
    assert len(history(run, "train_loss")) == 1200
    assert len(fetch(run).data.params) == 150


def test_logging_a_point_costs_microseconds(tracking: Tracking) -> None:
    run = tracking.start("cheap", params={}, tags={})
    begin_s = time.thread_time()  # of the processor, which others may be using
    for i in range(1000):
        run.point(Point(i, float(i), {"train_loss": 1.0, "top1": 0.5}))
    each_s = (time.thread_time() - begin_s) / 1000
    run.finish(None, status="FINISHED")
    assert each_s < 1e-3  # about 5 us on an idle machine


def test_a_deleted_experiment_is_used_again(tracking: Tracking) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(default_uri())
    client.delete_experiment(client.create_experiment("deleted"))
    store = Store(default_uri(), "deleted")
    store.connect()
    experiment = client.get_experiment_by_name("deleted")
    assert experiment is not None
    assert experiment.lifecycle_stage == "active"


def test_mlflow_says_nothing_itself(tracking: Tracking, capfd: pytest.CaptureFixture[str]) -> None:
    run = tracking.start("silent", params={}, tags={})
    run.finish(RESULT)
    assert capfd.readouterr() == ("", "")


def test_system_metrics_are_sampled_and_counted_on(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipebench.tracking.system.SAMPLE_EVERY_S", 0.0)
    names = [f"system/{name}" for name in ("cpu_utilization_percentage", "system_memory_usage_megabytes")]
    names += ["system/disk_usage_percentage"]
    run_id, seen = None, 0
    for _ in range(2):
        run = tracking.start("system", params={}, tags={}, virtual=False, run_id=run_id, system_metrics=True)
        while run._system is None or run._system._step < seen + 2:
            tracking.wake()
            time.sleep(0.01)
        run.finish(None, status="FINISHED")
        run_id, seen = run.run_id, run._system._step
        assert run.where().startswith("pipebench ui")
    for name in names:
        rows = history(run, name)
        assert [row.step for row in rows] == list(range(seen))
        assert all(row.value > 0 for row in rows if "cpu" not in name)
        assert abs(rows[-1].timestamp - time.time() * 1000) < 60_000


def test_a_host_without_counters_has_no_system_metrics(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipebench.tracking.system.SAMPLE_EVERY_S", 0.0)
    monkeypatch.setattr("pipebench.tracking.system._FOLDER", "no_such_package")
    run = tracking.start("no system", params={}, tags={}, system_metrics=True)
    run.finish(RESULT)
    assert fetch(run).info.status == "FINISHED"
    assert not [name for name in fetch(run).data.metrics if name.startswith("system/")]


def test_results_of_before_there_were_workers_can_be_read() -> None:
    data = json.loads(RESULT.to_json())
    del data["workers"]
    assert RunResult.from_json(json.dumps(data)) == RESULT


def test_every_worker_has_its_seconds(tracking: Tracking) -> None:
    rows = tuple(
        {"worker": i, "rank": i, "compute_s": float(i), "waiting_norm_s": 0.0, "bubble_fraction": 0.5}
        for i in range(11)
    )
    result = replace(RESULT, workers=rows)
    assert RunResult.from_json(result.to_json()) == result
    run = tracking.start("workers", params={}, tags={})
    run.finish(result)
    metrics = fetch(run).data.metrics
    assert (metrics["worker_03/compute_s"], metrics["worker_10/bubble_fraction"]) == (3.0, 0.5)
    assert not [name for name in metrics if "waiting_norm_s" in name or name.endswith("/rank")]


def test_seeds_that_missed_count_but_have_no_time() -> None:
    missed = replace(RESULT, outcome=MISSED, metrics={"time_to_accuracy_s": 99.0, "epoch_time_s": 3.0})
    reached = [replace(RESULT, metrics={"time_to_accuracy_s": value, "epoch_time_s": 2.0}) for value in (1.0, 2.0, 6.0)]
    summary = summarise_seeds([*reached, missed])
    assert (summary["runs_reached"], summary["runs_total"]) == (3, 4)
    assert summary["time_to_accuracy_s_mean"] == 3.0
    assert summary["time_to_accuracy_s_median"] == 2.0
    assert (summary["time_to_accuracy_s_min"], summary["time_to_accuracy_s_max"]) == (1.0, 6.0)
    assert summary["time_to_accuracy_s_std"] == pytest.approx(math.sqrt(7))
    assert summary["epoch_time_s_max"] == 3.0


def test_one_seed_has_no_spread_and_none_reached_no_time() -> None:
    assert "epoch_time_s_std" not in summarise_seeds([replace(RESULT, metrics={"epoch_time_s": 2.0})])
    assert "time_to_accuracy_s_mean" not in summarise_seeds([replace(RESULT, outcome=MISSED)])


def test_curves_ignore_values_that_are_not_finite() -> None:
    points = [Point(1, 1.0, {"train_loss": 2.0}), Point(2, 2.0, {"train_loss": math.inf})]
    assert summarise_curves(points) == {"best_train_loss": 2.0, "final_train_loss": 2.0}


def test_a_taken_port_is_told() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is taken"):
            choose_port(port)


def test_no_runs_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no runs are recorded"):
        open_ui()
