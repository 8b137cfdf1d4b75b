"""Runs that a later process resumes: one record, in which each value is there once."""

import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipebench.tracking.connection import default_uri
from pipebench.tracking.record import LogEntry, RecordFolder, Sent, Start, mlflow_run_id, read_record
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.tracking.store import Store
from pipebench.train.result import INTERRUPTED, REACHED
from pipebench.typed_json import read
from tests.patience import wait_for
from tests.tracking.records import RESULT, fetch, history, rescued


def sent(run: RunLog, tracking: Tracking) -> None:
    """Wait until MLflow has what the run has logged so far."""
    tracking.wake()
    wait_for(lambda: run._sender.is_empty)


@pytest.fixture
def resumed(tracking: Tracking, tmp_path: Path) -> tuple[RunLog, RunLog]:
    """A run that one process began and another finished, having gone back to the second of three points."""
    start: dict[str, Any] = {"tags": {"mode": "dp", "host": "first"}, "virtual": False, "folder": tmp_path / "record"}
    first = tracking.start("resumed", params={"lr": "0.1", "seed": "0"}, **start)
    for point in RESULT.points[:3]:
        first.point(point)
    sent(first, tracking)
    time.sleep(0.05)  # a start of its own, by the clock of milliseconds
    again = Tracking("suite")
    start["tags"] = {"mode": "dp", "host": "second", "gpu": "new"}
    second = again.start("resumed", params={"lr": "0.2", "seed": "0", "extra": "1"}, **start)
    for point in RESULT.points:
        second.point(replace(point, clock_s=point.clock_s + 0.25))  # a wall clock never comes out the same
    second.finish(replace(RESULT, clock="wall"))
    return first, second


def test_a_resumed_run_keeps_its_id_and_has_no_duplicates(resumed: tuple[RunLog, RunLog], tmp_path: Path) -> None:
    first, second = resumed
    assert second.run_id == first.run_id == mlflow_run_id(tmp_path / "record")
    for metric in ("curves/top1", "curves/train_loss"):
        rows = history(second, metric)
        assert [row.step for row in rows] == [1000, 2000, 3000, 4000]
        start_ms = fetch(second).info.start_time
        assert [row.timestamp - start_ms for row in rows] == [1500, 3000, 4500, 6250]
    starts = [entry.at_ms for entry in RecordFolder(tmp_path / "record").earlier("start") if entry.start is not None]
    assert fetch(second).info.start_time == starts[0] < starts[1]
    assert (fetch(second).info.status, fetch(second).data.tags["outcome"]) == ("FINISHED", REACHED)


def test_a_run_that_was_killed_after_its_last_value_has_each_once(tracking: Tracking, tmp_path: Path) -> None:
    """Whether it had noted what MLflow has or not."""
    first = tracking.start("closing", params={}, tags={}, virtual=False, folder=tmp_path)
    for point in RESULT.points:
        first.point(point)
    first.finish(RESULT)
    RecordFolder(tmp_path).write_sent(Sent(str(first.run_id), 2))
    again = Tracking("suite").start("closing", params={}, tags={}, virtual=False, folder=tmp_path)
    for point in RESULT.points:
        again.point(point)
    again.finish(RESULT)
    assert again.run_id == first.run_id
    for metric in ("curves/top1", "best_top1", "time_to_accuracy_s", "target_reached"):
        steps = [row.step for row in history(again, metric)]
        assert len(set(steps)) == len(steps) > 0, metric


def test_a_resumed_run_has_only_its_last_summary(tracking: Tracking, tmp_path: Path) -> None:
    """0.1.0 logged every result at step 0 beside the earlier ones; MLflow then drew them as a curve."""
    stopped = {"comm_bytes_total": 3e8, "epoch_time_s": 2.5, "bubble_fraction": 0.5}
    for metrics, outcome in ((stopped, INTERRUPTED), ({**stopped, "epoch_time_s": 2.0}, INTERRUPTED)):
        run = tracking.start("stopped", params={}, tags={}, folder=tmp_path)
        run.point(RESULT.points[0])
        run.finish(replace(RESULT, metrics=metrics, outcome=outcome, points=RESULT.points[:1]))
    run = tracking.start("stopped", params={}, tags={}, folder=tmp_path)
    for point in RESULT.points:
        run.point(point)
    run.finish(replace(RESULT, metrics={**RESULT.metrics, "bubble_fraction": 0.5}))
    shown = fetch(run).data.metrics
    for metric, value in {"comm_bytes_total": 1e9, "bubble_fraction": 0.5, "time_to_accuracy_s": 4.5}.items():
        assert [row.value for row in history(run, metric)] == [value] == [shown[metric]]
    assert "epoch_time_s" not in shown  # the last result has none
    assert [row.step for row in history(run, "curves/top1")] == [1000, 2000, 3000, 4000]


def test_a_summary_that_the_store_accepts_at_the_second_try_is_recorded_once(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier values are gone by then, and the new ones have not come."""
    first = tracking.start("tried", params={}, tags={}, folder=tmp_path)
    first.finish(replace(RESULT, metrics={"comm_bytes_total": 3e8}, outcome=INTERRUPTED))
    log, failed = tracking.store.log, list[int]()

    def fail_once(run_id: str, rows: Any, *more: Any) -> None:
        if any(row.metric == "comm_bytes_total" for row in rows) and not failed:
            failed.append(1)
            raise sqlite3.OperationalError("disk I/O error")
        log(run_id, rows, *more)

    monkeypatch.setattr(tracking.store, "log", fail_once)
    monkeypatch.setattr(tracking, "_warned", {"failure"})
    run = tracking.start("tried", params={}, tags={}, folder=tmp_path)
    run.result(RESULT)
    tracking.wake()
    wait_for(lambda: failed)
    run._retry_at_s = 0.0
    run.finish(None, status="FINISHED")
    assert [row.value for row in history(run, "comm_bytes_total")] == [1e9]


def test_changes_of_a_resumed_run_are_a_tag(resumed: tuple[RunLog, RunLog]) -> None:
    data = fetch(resumed[1]).data
    assert data.params == {"lr": "0.1", "seed": "0", "extra": "1"}
    assert data.tags["resumed.lr"] == "0.2"
    assert (data.tags["host"], data.tags["resumed.host"], data.tags["gpu"]) == ("first", "second", "new")
    assert data.tags["resumes"] == "1"
    assert not {"resumed.seed", "resumed.mode", "resumed.clock", "resumed.extra"} & data.tags.keys()


def test_a_run_that_mlflow_lost_is_sent_again_from_its_beginning(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, although making it anew fails at first."""
    create, failed = tracking.store.create_run, list[str]()

    def fail_once(name: str, *more: Any) -> str:
        if first_ended and not failed:
            failed.append(name)
            raise ConnectionError("not yet")
        return create(name, *more)

    first_ended = False
    monkeypatch.setattr(tracking.store, "create_run", fail_once)
    first = tracking.start("lost", params={"lr": "0.1"}, tags={}, folder=tmp_path)
    first.text("plan.txt", "straight")
    first.point(RESULT.points[0])
    first.finish(None, status="KILLED")
    RecordFolder(tmp_path).write_sent(Sent("0" * 32, 4))
    first_ended = True
    run = tracking.start("lost", params={"lr": "0.1"}, tags={}, folder=tmp_path)
    for point in RESULT.points:
        run.point(point)
    tracking.wake()
    wait_for(lambda: failed)
    run.finish(RESULT)
    assert run.run_id == mlflow_run_id(tmp_path)
    assert run.run_id not in (first.run_id, "0" * 32)
    assert fetch(run).info.status == "FINISHED"
    assert fetch(run).data.params == {"lr": "0.1"}
    assert [row.step for row in history(run, "curves/top1")] == [1000, 2000, 3000, 4000]
    assert (failed, fetch(run).data.tags["resumes"]) == (["lost"], "1"), "its first process, and the second"


def test_a_deleted_run_that_is_resumed_is_restored(tracking: Tracking, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    run = tracking.start("deleted", params={}, tags={}, folder=tmp_path)
    run.finish(None, status="KILLED")
    MlflowClient(default_uri()).delete_run(str(run.run_id))
    again = tracking.start("deleted", params={}, tags={}, folder=tmp_path)
    again.finish(RESULT)
    assert again.run_id == run.run_id
    assert (fetch(again).info.lifecycle_stage, fetch(again).info.status) == ("active", "FINISHED")


def test_a_parent_may_be_given_by_its_id(tracking: Tracking) -> None:
    parent = tracking.start("parent by id", params={}, tags={})
    parent.finish(None, status="FINISHED")
    run = tracking.start("child by id", params={}, tags={}, parent=parent.run_id)
    run.finish(RESULT)
    assert fetch(run).data.tags["mlflow.parentRunId"] == parent.run_id


def test_entries_that_mlflow_did_not_accept_are_sent_when_the_run_resumes(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "record"
    first = tracking.start("twice", params={"lr": "0.1"}, tags={}, folder=folder)

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(tracking.store, "log", fail)
        patch.setattr(tracking, "_warned", {"failure"})
        first.text("plan.txt", "straight")
        for point in RESULT.points[:2]:
            first.point(point)
        first.finish(None, status="KILLED")
    assert first.where() == f"{folder}/ (MLflow did not take it)"
    entries = folder / "record.jsonl"
    entries.write_text(entries.read_text() + '{"point": {"samples": 30')  # the crash came in the middle of a line
    second = Tracking("suite").start("twice", params={"lr": "0.1"}, tags={}, folder=folder)
    for point in RESULT.points[1:]:
        second.point(point)
    second.finish(RESULT)
    record = read_record(folder)
    assert record is not None
    assert (record.points, record.result, record.status) == (RESULT.points, RESULT, "FINISHED")
    assert (record.name, record.params, set(record.artifacts)) == (
        "twice",
        {"lr": "0.1"},
        {"plan.txt", "result.json", "stages.csv"},
    )
    assert [row.step for row in history(second, "curves/top1")] == [1000, 2000, 3000, 4000]
    assert fetch(second).info.status == "FINISHED"
    assert fetch(second).data.params == {"lr": "0.1"}


def test_a_moved_record_keeps_all_its_files(tracking: Tracking, folder: Path, tmp_path: Path) -> None:
    run = tracking.start("moves", params={}, tags={})
    run.point(RESULT.points[0])
    assert rescued(folder, "moves").exists()
    run.move(tmp_path / "record")
    run.point(RESULT.points[1])
    run.finish(None, status="KILLED")
    record = read_record(tmp_path / "record")
    assert record is not None
    assert record.points == RESULT.points[:2]
    assert not rescued(folder, "moves").exists()
    assert mlflow_run_id(tmp_path / "record") == run.run_id


def test_an_entry_is_read_back() -> None:
    entries = [
        LogEntry(start=Start("run", virtual=False, parent_id="p"), params={"a": "1"}, tags={"b": "2"}),
        LogEntry(metrics={"loss": 1.5}, step=3),
        LogEntry(point=RESULT.points[0]),
        LogEntry(artifact="a/b.txt"),
        LogEntry(result=RESULT),
        LogEntry(status="FAILED"),
    ]
    assert [read(LogEntry, entry.to_json()) for entry in entries] == entries


OTHERWISE = (*RESULT.points[:2], replace(RESULT.points[2], metrics={"train_loss": 7.0, "top1": 0.1}))


def went_back(tracking: Tracking, folder: Path) -> RunLog:
    """A run of four points, of which MLflow has three, whose second process went on after the second one, otherwise."""
    first = tracking.start("went back", params={}, tags={}, folder=folder)
    for point in RESULT.points[:3]:
        first.point(point)
    sent(first, tracking)
    first._sender.close()
    RecordFolder(folder).append(LogEntry(point=RESULT.points[3]))
    again = tracking.start("went back", params={}, tags={}, folder=folder, goes_on_from=2000)
    for point in OTHERWISE:
        again.point(point)
    again.finish(replace(RESULT, points=OTHERWISE))
    return again


def test_the_abandoned_points_of_a_rewound_run_are_removed(tracking: Tracking, tmp_path: Path) -> None:
    """They stayed, and those that replaced them were dropped: the curve mixed both."""
    run = went_back(tracking, tmp_path)
    record = read_record(tmp_path)
    assert record is not None
    assert record.points == OTHERWISE
    rows = history(run, "curves/train_loss")
    assert [(row.step, row.value) for row in rows] == [(1000, 2.0), (2000, 0.5), (3000, 7.0)]
    assert fetch(run).data.metrics["curves/top1"] == 0.1


def test_a_server_that_cannot_delete_points_has_both_branches_and_a_tag(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(*_: object, after: int = -1) -> bool:
        return after < 0

    monkeypatch.setattr(Store, "remove_values", keep)
    run = went_back(tracking, tmp_path)
    rows = sorted((row.step, row.value) for row in history(run, "curves/train_loss"))
    assert rows == [(1000, 2.0), (2000, 0.5), (3000, 0.25), (3000, 7.0), (4000, 0.75)]
    assert fetch(run).data.tags["went_back"].startswith("to 2,000 samples")


def test_the_last_value_of_a_rewound_curve_is_its_last_remaining_one(tracking: Tracking, tmp_path: Path) -> None:
    run = tracking.start("shortened", params={}, tags={}, folder=tmp_path)
    for point in RESULT.points:
        run.point(point)
    sent(run, tracking)
    again = tracking.start("shortened", params={}, tags={}, folder=tmp_path, goes_on_from=1000)
    again.finish(None, status="KILLED")
    assert fetch(again).data.metrics == {"curves/virtual_time_s": 1.5, "curves/train_loss": 2.0, "curves/top1": 0.5}
    assert fetch(again).data.tags["resumes"] == "1"


def test_samples_of_the_system_are_continued_without_reading_them_all(tracking: Tracking, tmp_path: Path) -> None:
    """After ten days reading them took a minute."""
    from mlflow.tracking import MlflowClient

    first = tracking.start("sampled", params={}, tags={}, folder=tmp_path)
    for step in (7, 3):
        first._sender.add(LogEntry(metrics={"system/cpu": 0.5, "loss": 1.0}, step=step + 100))
    sent(first, tracking)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(MlflowClient, "get_metric_history")
        again = tracking.start("sampled", params={}, tags={}, folder=tmp_path, system_metrics=True)
        again.finish(None, status="KILLED")
    assert again._sender._system is not None
    assert again._sender._system._step == 108
