"""Runs recorded in a real SQLite store, and kept on disk when MLflow fails."""

import json
import math
import multiprocessing
import os
import socket
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipebench.errors import UserError
from pipebench.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult
from pipebench.tracking import RunLog, Tracking, default_uri, open_ui, summarise_curves, summarise_seeds
from pipebench.tracking.store import Row, Store
from pipebench.tracking.ui import choose_port

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
    metrics={"time_to_accuracy_s": 4.5, "total_time_s": 6.0, "comm_bytes_total": 1e9},
    points=tuple(
        Point(samples=1000 * (i + 1), clock_s=1.5 * (i + 1), metrics={"train_loss": loss, "top1": top1})
        for i, (loss, top1) in enumerate([(2.0, 0.5), (0.5, 0.8), (0.25, 0.96), (0.75, 0.9)])
    ),
    stages=({"index": 0, "peak_memory_bytes": 100, "samples_per_update": 32}, {"index": 1, "peak_memory_bytes": 60}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory whose store is shared by the module: making one takes seconds."""
    path = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def tracking(folder: Path) -> Tracking:
    tracking = Tracking("suite")
    assert tracking.wait_until_ready()
    return tracking


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


def comparison_of(run: RunLog) -> RunLog:
    parent = run._start.parent
    assert isinstance(parent, RunLog)
    return parent


def rescued(folder: Path, name: str) -> Path:
    return folder / "pipebench-results" / f"{name}-1"


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
    begin_s = time.perf_counter()
    for i in range(1000):
        run.point(Point(i, float(i), {"train_loss": 1.0, "top1": 0.5}))
    each_s = (time.perf_counter() - begin_s) / 1000
    run.finish(None, status="FINISHED")
    assert each_s < 1e-3  # about 5 us on an idle machine; the limit leaves room for a busy one


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


def test_a_store_that_fails_in_mid_run_loses_nothing(
    tracking: Tracking,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tracking, "_warned", False)
    run = tracking.start("broken", params={"a": "1"}, tags={})
    run.point(RESULT.points[0])

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "log", fail)
        run.point(RESULT.points[1])
        run.text("plan.txt", "straight")
        run.finish(RESULT)
    kept = rescued(folder, "broken")
    assert RunResult.from_json((kept / "result.json").read_text()) == RESULT
    points = [json.loads(line) for line in (kept / "points.jsonl").read_text().splitlines()]
    assert [point["samples"] for point in points] == [1000, 2000]
    assert (kept / "plan.txt").read_text() == "straight"
    assert json.loads((kept / "run.json").read_text())["params"] == {"a": "1"}
    assert run.where() == "pipebench-results/broken-1/ (MLflow did not take it)"
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "(disk I/O error); everything is kept in pipebench-results/broken-1. The run goes on." in warning


def test_a_store_that_recovers_has_everything(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracking.start("recovers", params={}, tags={})
    failed = iter([True])
    log = Store.log

    def fail_once(store: Store, run_id: str, rows: list[Row], params: dict[str, str], tags: dict[str, str]) -> None:
        if next(failed, False):
            raise sqlite3.OperationalError("database is locked")
        log(store, run_id, rows, params, tags)

    monkeypatch.setattr(Store, "log", fail_once)
    run.point(RESULT.points[0])
    tracking.wake()
    while run._rescue.path is None:
        time.sleep(0.01)
    run.finish(RESULT)
    assert fetch(run).data.metrics["best_top1"] == 0.96
    assert run.where().startswith("pipebench ui")


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hung_server_does_not_block_the_end(
    silent_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent_server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("pipebench.tracking.run_log._PATIENCE_SERVER_S", 0.5)
    monkeypatch.chdir(tmp_path)
    tracking = Tracking("suite")
    assert not tracking.wait_until_ready()
    parent = tracking.start("parent", params={}, tags={})
    run = tracking.start("child", params={}, tags={}, parent=parent)
    begin_s = time.monotonic()
    run.finish(RESULT)
    parent.finish(None, status="FINISHED")
    assert time.monotonic() - begin_s < 5
    assert RunResult.from_json((rescued(tmp_path, "child") / "result.json").read_text()) == RESULT
    assert capsys.readouterr().err.count("does not answer") == 1


def test_a_server_that_is_down_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.chdir(tmp_path)
        run = Tracking("suite").start("down", params={}, tags={})
        run.point(RESULT.points[0])
        run.finish(RESULT)
    assert RunResult.from_json((rescued(tmp_path, "down") / "result.json").read_text()) == RESULT
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "Connection refused" in warning
    assert "MLflow did not take it" in run.where()


def test_a_folder_that_cant_be_written_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}")
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "pipebench-results").write_text("not a folder either")
    monkeypatch.chdir(tmp_path)
    run = Tracking("suite").start("nowhere", params={}, tags={})
    run.finish(RESULT)
    assert "The run goes on" in capsys.readouterr().err
    assert run.where() == "not recorded: MLflow and the disk failed"


def record_one_run(folder: str, index: int, barrier: Any) -> None:
    os.chdir(folder)
    barrier.wait()
    run = Tracking("shared").start(f"run{index}", params={"index": str(index)}, tags={})
    for point in RESULT.points:
        run.point(point)
        time.sleep(0.01)
    run.finish(RESULT)
    assert run.where().startswith("pipebench ui")


def test_three_processes_at_once_on_a_new_store(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [context.Process(target=record_one_run, args=(str(tmp_path), i, barrier)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not (tmp_path / "pipebench-results").exists()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("shared")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["run0", "run1", "run2"]
    assert all(run.info.status == "FINISHED" and run.data.metrics["best_top1"] == 0.96 for run in runs)


def test_a_store_whose_making_was_cut_short_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow makes 60 tables in as many transactions; after a kill in between it refuses its own file for good."""
    path = tmp_path / "mlflow.db"

    def killed(source: Path, target: Path) -> None:
        assert target == path
        assert not path.exists()
        source.write_bytes(source.read_bytes()[:20000])  # as the disk may have it
        raise SystemError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("pipebench.tracking.store.os.replace", killed)
        with pytest.raises(SystemError, match="killed"):
            Store(f"sqlite:///{path}", "cut").connect()
    store = Store(f"sqlite:///{path}", "cut")
    store.connect()
    run_id = store.create_run("run", {}, 0)
    store.end_run(run_id, "FINISHED", 1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mlflow.db", "mlflow.db.lock"]


@pytest.fixture
def resumed(tracking: Tracking) -> tuple[RunLog, RunLog, list[str]]:
    """A run that one process began and another finished, having gone back to the second of three points."""
    ids: list[str] = []
    start: dict[str, Any] = {"tags": {"mode": "dp", "host": "first"}, "virtual": False, "on_run_id": ids.append}
    first = tracking.start("resumed", params={"lr": "0.1", "seed": "0"}, **start)
    for point in RESULT.points[:3]:
        first.point(point)
    tracking.wake()
    while first._queue:
        time.sleep(0.01)
    time.sleep(0.05)  # a start of its own, by the clock of milliseconds
    again = Tracking("suite")
    start["tags"] = {"mode": "dp", "host": "second", "gpu": "new"}
    second = again.start("resumed", params={"lr": "0.2", "seed": "0", "extra": "1"}, run_id=first.run_id, **start)
    for point in RESULT.points:
        second.point(replace(point, clock_s=point.clock_s + 0.25))  # a wall clock never comes out the same
    second.finish(replace(RESULT, clock="wall"))
    return first, second, ids


def test_a_resumed_run_goes_on_under_its_id_without_duplicates(resumed: tuple[RunLog, RunLog, list[str]]) -> None:
    first, second, ids = resumed
    assert second.run_id == first.run_id
    assert ids == [first.run_id]
    for metric in ("top1", "train_loss"):
        rows = history(second, metric)
        assert [row.step for row in rows] == [1000, 2000, 3000, 4000]
        start_ms = fetch(second).info.start_time
        assert [row.timestamp - start_ms for row in rows] == [1500, 3000, 4500, 6250]
    assert fetch(second).info.start_time == first._start_ms < second._start_ms
    assert (fetch(second).info.status, fetch(second).data.tags["outcome"]) == ("FINISHED", REACHED)


def test_a_run_that_was_killed_after_its_last_value_has_each_once(tracking: Tracking) -> None:
    first = tracking.start("closing", params={}, tags={}, virtual=False)
    for point in RESULT.points:
        first.point(point)
    first.finish(RESULT)
    again = Tracking("suite").start("closing", params={}, tags={}, virtual=False, run_id=first.run_id)
    for point in RESULT.points:
        again.point(point)
    again.finish(RESULT)
    for metric in ("top1", "best_top1", "time_to_accuracy_s", "peak_memory_bytes/stage_0"):
        steps = [row.step for row in history(again, metric)]
        assert len(set(steps)) == len(steps) > 0, metric


def test_what_changed_when_a_run_resumed_is_a_tag(resumed: tuple[RunLog, RunLog, list[str]]) -> None:
    data = fetch(resumed[1]).data
    assert data.params == {"lr": "0.1", "seed": "0", "extra": "1"}
    assert data.tags["resumed.lr"] == "0.2"
    assert (data.tags["host"], data.tags["resumed.host"], data.tags["gpu"]) == ("first", "second", "new")
    assert data.tags["resumes"] == "1"
    assert not {"resumed.seed", "resumed.mode", "resumed.clock", "resumed.extra"} & data.tags.keys()


def test_a_run_that_mlflow_lost_begins_again(tracking: Tracking) -> None:
    ids: list[str] = []
    run = tracking.start("lost", params={}, tags={}, run_id="0" * 32, on_run_id=ids.append)
    run.finish(RESULT)
    assert ids == [run.run_id] != ["0" * 32]
    assert fetch(run).info.status == "FINISHED"


def test_a_deleted_run_that_goes_on_is_restored(tracking: Tracking) -> None:
    from mlflow.tracking import MlflowClient

    run = tracking.start("deleted", params={}, tags={})
    run.finish(None, status="KILLED")
    MlflowClient(default_uri()).delete_run(str(run.run_id))
    again = tracking.start("deleted", params={}, tags={}, run_id=run.run_id)
    again.finish(RESULT)
    assert (fetch(again).info.lifecycle_stage, fetch(again).info.status) == ("active", "FINISHED")


def test_trouble_with_the_run_id_is_not_mlflows(tracking: Tracking, folder: Path) -> None:
    def fail(_: str) -> None:
        raise OSError("no space left")

    run = tracking.start("unkept", params={}, tags={}, on_run_id=fail)
    run.finish(RESULT)
    assert fetch(run).info.status == "FINISHED"
    assert not rescued(folder, "unkept").exists()


def test_a_parent_may_be_given_by_its_id(tracking: Tracking) -> None:
    parent = tracking.start("parent by id", params={}, tags={})
    parent.finish(None, status="FINISHED")
    run = tracking.start("child by id", params={}, tags={}, parent=parent.run_id)
    run.finish(RESULT)
    assert fetch(run).data.tags["mlflow.parentRunId"] == parent.run_id


def test_a_rescued_run_goes_on_in_its_folder_without_duplicates(
    tracking: Tracking, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tracking.start("twice", params={}, tags={})
    tracking.wake()
    while first._queue:
        time.sleep(0.01)

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Store, "log", fail)
    monkeypatch.setattr(tracking, "_warned", True)
    for point in RESULT.points[:2]:
        first.point(point)
    first.finish(None, status="KILLED")
    kept = rescued(folder, "twice") / "points.jsonl"
    kept.write_text(kept.read_text() + '{"samples": 30')  # the crash came in the middle of a line
    second = tracking.start("twice", params={}, tags={}, run_id=first.run_id)
    for point in RESULT.points[1:]:
        second.point(point)
    second.finish(RESULT)
    assert [json.loads(line)["samples"] for line in kept.read_text().splitlines()] == [1000, 2000, 3000, 4000]
    assert RunResult.from_json((kept.parent / "result.json").read_text()) == RESULT
    assert not (kept.parent.parent / "twice-2").exists()


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
