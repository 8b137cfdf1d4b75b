"""Runs that a later process goes on with: one record, each value once."""

import json
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipebench.tracking import RunLog, Tracking, default_uri
from pipebench.tracking.store import Store
from pipebench.train.result import REACHED, RunResult
from pipebench.typed_json import read
from tests.tracking.records import RESULT, fetch, history, rescued


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
    assert read(RunResult, (kept.parent / "result.json").read_text()) == RESULT
    assert not (kept.parent.parent / "twice-2").exists()
