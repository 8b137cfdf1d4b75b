"""Runs that one process logs and another sends to MLflow; here both are one process."""

import errno
import io
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipebench.files import read_bytes
from pipebench.tracking import system as system_metrics
from pipebench.tracking.orphaned import close_orphaned
from pipebench.tracking.record import ENTRIES, LogEntry, RecordFolder, mlflow_run_id, read_record
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.tracking.store import Store
from tests.patience import wait_for
from tests.tracking.records import RESULT, fetch, history


def elsewhere() -> Tracking:
    return Tracking("suite", lambda limit_s: True)


def begun(folder: Path, **tags: str) -> RunLog:
    """Begin a run, or go on with it, in a process of which nothing else is left."""
    return elsewhere().start("followed", params={"lr": "0.1"}, tags=tags, virtual=False, folder=folder)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "run" / "record"


@pytest.fixture
def follower(tracking: Tracking, record: Path) -> Iterator[RunLog]:
    with tracking.following(record) as log:
        yield log


def test_entries_of_one_process_are_sent_by_another(follower: RunLog, record: Path) -> None:
    run = begun(record, mode="dp")
    for point in RESULT.points:
        run.point(point)
    run.text("note.txt", "an artifact")
    run.finish(RESULT)
    follower.settle()
    assert follower.run_id == mlflow_run_id(record) is not None
    stored = fetch(follower)
    assert (stored.info.status, stored.data.params, stored.data.tags["mode"]) == ("FINISHED", {"lr": "0.1"}, "dp")
    assert [row.step for row in history(follower, "curves/top1")] == [1000, 2000, 3000, 4000]
    assert follower.where() == "pipebench ui   (experiment suite, run followed)"
    assert run.where() == "", "its process doesn't know"


@pytest.mark.usefixtures("folder")
def test_logging_imports_nothing_and_connects_nowhere(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connects = Store.connect

    def connect(store: Store) -> None:
        assert threading.current_thread() is not threading.main_thread(), "this process doesn't send"
        connects(store)  # threads of other tests do

    monkeypatch.setattr(Store, "connect", connect)
    before = {*threading.enumerate()}
    begun(record).point(RESULT.points[0])
    assert {*threading.enumerate()} <= before
    found = read_record(record)
    assert found is not None
    assert found.points == (RESULT.points[0],)


@pytest.mark.parametrize("ends", [False, True])
def test_a_restarted_process_continues_its_run(ends: bool, follower: RunLog, record: Path) -> None:
    """Whether the first could still say that it failed or not."""
    first = begun(record)
    for point in RESULT.points[:3]:
        first.point(point)
    if ends:
        first.finish(status="FAILED")
        follower.settle()
        assert fetch(follower).info.status == "FAILED"
    second = begun(record)
    for point in RESULT.points:
        second.point(point)
    second.finish(RESULT)
    wait_for(lambda: follower.run_id and fetch(follower).info.status == "FINISHED")
    follower.settle()
    assert [row.step for row in history(follower, "curves/top1")] == [1000, 2000, 3000, 4000]
    assert fetch(follower).data.tags["resumes"] == "1"


def test_the_follower_ends_a_run_whose_process_did_not(follower: RunLog, record: Path) -> None:
    run = begun(record)
    run.point(RESULT.points[0])
    follower.finish(status="FAILED")
    assert fetch(follower).info.status == "FAILED"
    assert [row.step for row in history(follower, "curves/top1")] == [1000]


def test_entries_that_a_follower_left_are_sent_by_a_later_command(tracking: Tracking, record: Path) -> None:
    """As after a second Ctrl-C, when the launcher waits neither for its workers nor for MLflow."""
    with tracking.following(record) as log:
        run = begun(record)
        wait_for(lambda: mlflow_run_id(record))
    run.point(RESULT.points[0])
    run._sender.record.release()  # as the system does for a process that was killed
    close_orphaned(tracking.store.uri, [record])
    assert fetch(log).info.status == "KILLED"
    assert [row.step for row in history(log, "curves/top1")] == [1000]


@pytest.mark.usefixtures("folder")
def test_a_store_that_fails_is_reported_once_and_not_waited_for(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    tracking = Tracking("suite")
    monkeypatch.setattr(tracking.store, "connect", fail)  # not of all stores: another test's thread would warn too
    with tracking.following(record) as log:
        begun(record).finish(RESULT)
        log.settle()
        assert log.where().endswith("record/ (MLflow did not take it)")
    assert capsys.readouterr().err.count("disk I/O error") == 1
    found = read_record(record)
    assert found is not None
    assert found.result == RESULT


def test_a_sample_of_this_host_may_come_after_the_end(tracking: Tracking, record: Path) -> None:
    """The follower takes one while the other process ends."""
    run = begun(record)
    run._sender.add(LogEntry(status="FINISHED"))
    RecordFolder(record).append(LogEntry(metrics={"system/cpu": 0.5}))
    with tracking.following(record) as log:
        log.settle()
    stored = fetch(log)
    assert (stored.info.status, stored.data.metrics) == ("FINISHED", {"system/cpu": 0.5})


def test_this_host_is_sampled(follower: RunLog, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "SAMPLE_EVERY_S", 0.0)
    run = begun(record)
    wait_for(lambda: b"system/" in (record / ENTRIES).read_bytes())
    run.finish(RESULT)
    follower.settle()
    assert any(name.startswith("system/") for name in fetch(follower).data.metrics)


def test_an_entry_is_read_once_it_is_complete(tmp_path: Path) -> None:
    record = RecordFolder(tmp_path)
    line = LogEntry(tags={"mode": "dp"}).to_json() + "\n"
    with (tmp_path / ENTRIES).open("w", encoding="utf-8") as file:
        file.write(line + line[:9])
        file.flush()
        assert [entry.tags for entry in record.new_entries()] == [{"mode": "dp"}]
        assert [entry.tags for entry in RecordFolder(tmp_path).earlier()] == [{"mode": "dp"}]
        file.write(line[9:])
    assert [entry.tags for entry in record.new_entries()] == [{"mode": "dp"}]
    assert record.new_entries() == []


@pytest.mark.parametrize("lacks", [1, 9], ids=["all but its end", "a part"])
def test_a_partial_entry_of_a_killed_process_does_not_damage_others(tmp_path: Path, lacks: int) -> None:
    """The launcher's next line was joined to it: the run's end was lost, and MLflow showed it as RUNNING."""
    record = RecordFolder(tmp_path)
    record.append(LogEntry(tags={"mode": "dp"}))
    line = LogEntry(result=RESULT).to_json() + "\n"
    with (tmp_path / ENTRIES).open("a", encoding="utf-8") as file:
        file.write(line[:-lacks])
    record.append(LogEntry(status="FAILED"))
    record.append(LogEntry(tags={"mode": "dp"}))
    for heard in (record.new_entries(), RecordFolder(tmp_path).earlier()):
        assert [entry.status for entry in heard] == [None, "FAILED", None]


def test_a_reopened_record_keeps_its_entries(tmp_path: Path) -> None:
    """A torn line was cut off by writing the file anew: with a full disk, or a kill then, all of it was lost."""
    RecordFolder(tmp_path).append(LogEntry(tags={"mode": "dp"}))
    with (tmp_path / ENTRIES).open("a", encoding="utf-8") as file:
        file.write("{")
    before = (tmp_path / ENTRIES).read_bytes()
    RecordFolder(tmp_path)
    assert (tmp_path / ENTRIES).read_bytes() == before


class OneByte(io.FileIO):
    """A file on a disk with room for one byte, which the system writes and reports."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return super().write(data[:1])


def test_only_a_partially_written_entry_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry after it was joined to it, and both were lost without a message."""
    record = RecordFolder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode, buffering: OneByte(path, mode))
        record.append(LogEntry(tags={"mode": "dp"}))
    assert record.path is None, "it says that the disk is full"
    RecordFolder(tmp_path).append(LogEntry(status="FAILED"))
    assert [entry.status for entry in RecordFolder(tmp_path).earlier()] == ["FAILED"]


def test_entries_are_read_once(tmp_path: Path) -> None:
    """The whole record was, for every entry: 0.1 s after ten days, with all its samples in memory."""
    record = RecordFolder(tmp_path)
    record.append(LogEntry(tags={"mode": "dp"}))
    assert len(record.new_entries()) == 1
    heard = record.__dict__.copy()
    entries = tmp_path / ENTRIES
    entries.write_bytes(b"x" * (entries.stat().st_size - 1) + b"\n")
    record.append(LogEntry(tags={"mode": "gpipe"}))
    assert [entry.tags for entry in record.new_entries()] == [{"mode": "gpipe"}]
    assert {name for name, value in record.__dict__.items() if value != heard[name]} == {"_num_bytes"}


def test_an_end_that_a_full_disk_cannot_store_is_sent(
    follower: RunLog, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is what came before the disk was full, though what MLflow has of it can't be noted."""
    run = begun(record)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        run.point(RESULT.points[0])
        wait_for(lambda: follower.run_id and follower._sender.is_empty)
        run.point(RESULT.points[1])
        wait_for(lambda: follower._sender.record.num_sent == 3)
        patch.setattr(Path, "open", full)
        follower.finish(status="FINISHED")
    assert fetch(follower).info.status == "FINISHED"
    assert [row.step for row in history(follower, "curves/top1")] == [1000, 2000]


def test_an_artifact_is_read_whole_while_the_record_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's first checkpoint moved the record between an artifact's path and its reading, and MLflow never had it."""
    record = RecordFolder.of_name("run", tmp_path)
    record.append(LogEntry(artifact="plan.json"), b"{}")
    moving = threading.Thread(target=record.move, args=(tmp_path / "record",))

    def read(path: Path, most: int) -> bytes:
        moving.start()
        moving.join(0.2)  # time enough, if nothing holds it up
        return read_bytes(path, most)

    monkeypatch.setattr("pipebench.tracking.record.read_bytes", read)
    assert record.content("plan.json") == b"{}"
    moving.join()
    assert record.path == tmp_path / "record"
