"""MLflow stores that fail, hang or are incomplete: entries are kept on disk, and no run waits."""

import multiprocessing
import os
import re
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy
from mlflow.tracking import MlflowClient

from pipebench.errors import UserError
from pipebench.tracking.connection import default_uri
from pipebench.tracking.orphaned import close_orphaned
from pipebench.tracking.record import LogEntry, RecordFolder, Start, read_record
from pipebench.tracking.run_log import Tracking
from pipebench.tracking.sender import Sender
from pipebench.tracking.store import MetricRow, Store, require_writable
from pipebench.train.result import RunResult
from pipebench.typed_json import read
from tests.patience import PATIENCE_S, wait_for
from tests.processes import IMPORTED
from tests.tracking.records import RESULT, fetch, rescued


def test_a_store_that_fails_during_a_run_loses_no_entry(
    tracking: Tracking, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "_warned", set())
    run = tracking.start("broken", params={"a": "1"}, tags={})
    run.point(RESULT.points[0])

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(tracking.store, "log", fail)  # not of all stores: another test's thread would warn, too
        run.point(RESULT.points[1])
        run.text("plan.txt", "straight")
        run.finish(RESULT)
    kept = rescued(folder, "broken")
    assert read(RunResult, (kept / "result.json").read_bytes()) == RESULT
    record = read_record(kept)
    assert record is not None
    assert record.points == RESULT.points[:2]
    assert (kept / "plan.txt").read_text() == "straight"
    assert (record.params, record.result, record.status) == ({"a": "1"}, RESULT, "FINISHED")
    assert run.where() == "pipebench-results/broken-1/ (MLflow did not take it)"
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "(disk I/O error); everything is kept in pipebench-results/broken-1. The run goes on." in warning


@pytest.mark.parametrize("value", ["many", None], ids=str)
def test_a_metric_that_is_not_finite_loses_no_result(
    tracking: Tracking, folder: Path, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.2.0 recorded it: the result couldn't be read back, and MLflow got neither it nor the run's end."""
    run = tracking.start("odd", params={}, tags={}, folder=folder / f"odd-{value}")
    run.metrics({"own": value, "width": 2})
    odd: dict[str, Any] = {"staleness_max": value, "num_workers": np.float32(4)}
    run.finish(replace(RESULT, metrics={**RESULT.metrics, **odd}))
    record, stored = read_record(folder / f"odd-{value}"), fetch(run)
    assert record is not None
    assert record.result == replace(RESULT, metrics={**RESULT.metrics, "num_workers": 4.0})
    assert (stored.info.status, stored.data.metrics["num_workers"], stored.data.metrics["width"]) == ("FINISHED", 4, 2)
    assert [line.partition(" of ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "pipebench: metric own",
        "pipebench: metric staleness_max",
    ]


@pytest.mark.parametrize("recovers", [False, True])
def test_a_refused_artifact_does_not_delay_other_entries(
    tracking: Tracking,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recovers: bool,
) -> None:
    """A proxy's 413 for a trace left the run running for ever, without its result."""
    monkeypatch.setattr(tracking, "_warned", set())
    run = tracking.start("refused", params={}, tags={})
    send, refuses = tracking.store.log_artifact, [True]

    def refuse(run_id: str, name: str, content: bytes) -> None:
        if run_id == run.run_id and name == "trace.json" and refuses:
            raise OSError("413 Request Entity Too Large")
        send(run_id, name, content)

    monkeypatch.setattr(tracking.store, "log_artifact", refuse)
    run.text("trace.json", "[]")
    run.text("plan.json", "{}")
    tracking.wake()
    wait_for(lambda: run._sender.is_empty)
    assert fetch(run).data.tags["artifacts_missing"] == "trace.json"
    if recovers:
        refuses.clear()
    run.finish(RESULT)
    data = fetch(run)
    assert (data.info.status, data.data.metrics["best_top1"]) == ("FINISHED", 0.96)
    names = {each.path for each in MlflowClient(default_uri()).list_artifacts(str(run.run_id))}
    assert names == {"plan.json", "result.json", "stages.csv"} | ({"trace.json"} if recovers else set())
    assert ("artifacts_missing" in data.data.tags) is not recovers
    kept = rescued(folder, "refused")
    assert kept.exists() is not recovers
    printed = capsys.readouterr().err
    assert (
        "doesn't take trace.json (413 Request Entity Too Large); it is kept in pipebench-results/refused-1" in printed
    )
    if not recovers:
        assert (kept / "trace.json").read_text() == "[]"
        shutil.rmtree(kept.parent)


def test_the_end_of_a_run_retries_its_comparison(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a moment's outage at its start the next try was half a minute away, and its runs were given up."""
    create, failed = tracking.store.create_run, list[str]()

    def fail_once(name: str, *more: Any) -> str:
        if not failed:
            failed.append(name)
            raise ConnectionError("refused")
        return create(name, *more)

    monkeypatch.setattr(tracking.store, "create_run", fail_once)
    parent = tracking.start("parent", params={}, tags={})
    tracking.wake()
    wait_for(lambda: parent._failed)
    child = tracking.start("child", params={}, tags={}, parent=parent)
    child.finish(RESULT)
    assert fetch(child).data.tags["mlflow.parentRunId"] == parent.run_id
    parent.finish(status="FINISHED")


def test_a_run_whose_creation_was_not_acknowledged_is_not_created_twice(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network lost the answer; the next try made another run, and the first was running for ever."""
    create, made = tracking.store.create_run, list[str]()

    def answer_lost(name: str, *more: Any) -> str:
        made.append(create(name, *more))
        if len(made) == 1:
            raise ConnectionError("reset by peer")
        return made[-1]

    monkeypatch.setattr(tracking.store, "create_run", answer_lost)
    run = tracking.start("answer lost", params={"a": "1"}, tags={})
    tracking.wake()
    wait_for(lambda: run._failed)
    run.finish(RESULT)
    assert made == [run.run_id]
    assert fetch(run).data.params == {"a": "1"}


def test_a_run_that_a_killed_process_has_just_created_is_ended(tracking: Tracking, folder: Path) -> None:
    """Its id wasn't noted yet: a later command made another run of it."""
    assert tracking.wait_until_ready()
    record, store = RecordFolder.of_name("just made", folder), Store(default_uri(), "suite")
    begins = LogEntry(start=Start("just made", virtual=False, suite="suite"))
    record.append(begins)
    store.connect()
    run_id = store.create_run("just made", {}, begins.at_ms)
    record.release()
    assert record.path is not None
    close_orphaned(default_uri(), [record.path])
    assert MlflowClient(default_uri()).get_run(run_id).info.status == "KILLED"


def test_a_store_that_recovers_has_everything(
    tracking: Tracking, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracking.start("recovers", params={}, tags={})
    failed = list[str]()
    log = tracking.store.log

    def fail_once(run_id: str, *more: Any) -> None:
        if run_id == run.run_id and not failed:
            failed.append(run_id)
            raise sqlite3.OperationalError("database is locked")
        log(run_id, *more)

    monkeypatch.setattr(tracking.store, "log", fail_once)
    run.point(RESULT.points[0])
    tracking.wake()
    wait_for(lambda: run._failed)
    assert rescued(folder, "recovers").exists()
    run.finish(RESULT)
    assert not rescued(folder, "recovers").exists()
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
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{2 * PATIENCE_S:.0f}")  # so to come back is not to have waited
    monkeypatch.setattr("pipebench.tracking.run_log._PATIENCE_SERVER_S", 0.5)
    monkeypatch.chdir(tmp_path)
    tracking = Tracking("suite")
    assert not tracking.wait_until_ready()
    parent = tracking.start("parent", params={}, tags={})
    run = tracking.start("child", params={}, tags={}, parent=parent)
    run.finish(RESULT)
    parent.finish(None, status="FINISHED")
    assert read(RunResult, (rescued(tmp_path, "child") / "result.json").read_bytes()) == RESULT
    assert capsys.readouterr().err.count("does not answer") == 1


def test_a_server_that_is_down_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setattr("pipebench.tracking.run_log._PATIENCE_SERVER_S", PATIENCE_S)
        monkeypatch.chdir(tmp_path)
        run = Tracking("suite").start("down", params={}, tags={})
        run.point(RESULT.points[0])
        run.finish(RESULT)
    assert read(RunResult, (rescued(tmp_path, "down") / "result.json").read_bytes()) == RESULT
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


@pytest.mark.parametrize(("name", "misread"), [("a?b", "?"), ("a%20b", "%20")])
def test_a_folder_whose_name_sqlite_would_misread_is_refused(
    name: str, misread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database of a folder `a?b` was the file `a` beside it: MLflow's URI of a SQLite file knows no escapes."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UserError, match=f"MLflow takes '{re.escape(misread)}' in a path for something else"):
        require_writable()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere.db")
    require_writable()


@pytest.mark.parametrize("name", ["a#b", "a%b", "a b", "a;b", "a'b&=ä"])
def test_other_special_characters_in_names_of_folders_are_allowed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    require_writable()
    engine = sqlalchemy.create_engine(default_uri())
    assert engine.dialect.create_connect_args(engine.url)[0] == [str(tmp_path / name / "mlflow.db")]


def test_a_disk_that_fails_during_a_run_loses_nothing_in_mlflow(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracking.start("full disk", params={}, tags={}, folder=tmp_path)
    run.point(RESULT.points[0])

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        run.text("plan.txt", "straight")
    run.finish(RESULT)
    assert fetch(run).info.status == "FINISHED"
    assert fetch(run).data.metrics["best_top1"] == 0.96
    assert run.where().startswith("pipebench ui")


@pytest.mark.parametrize("uri", ["sqlite:///{0}/file/mlflow.db", "{0}/file/mlruns", "file://{0}/file/mlruns"])
def test_runs_without_any_place_to_be_recorded_do_not_begin(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(tmp_path))
    (tmp_path / "file").write_text("not a folder")
    require_writable()  # what MLflow doesn't take would go beside it
    (tmp_path / "pipebench-results").write_text("not a folder either")
    with pytest.raises(UserError, match=r"nothing can be written to .*file/ml.*, nor to .*pipebench-results; run in"):
        require_writable()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    require_writable()  # only a server knows what it takes


def test_checks_of_folders_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/new/deep/mlflow.db")
    require_writable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_folder_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="runs would not be recorded"):
        require_writable()


def record_one_run(folder: str, index: int, barrier: Any) -> None:
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # it may have been there when the server of copies started
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

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    barrier = context.Barrier(3)
    processes = [context.Process(target=record_one_run, args=(str(tmp_path), i, barrier)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not (tmp_path / "pipebench-results").exists()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("shared")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["run0", "run1", "run2"]
    assert all(run.info.status == "FINISHED" and run.data.metrics["best_top1"] == 0.96 for run in runs)


def test_a_store_whose_creation_was_interrupted_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow makes 60 tables in as many transactions; after a kill in between it refuses its file."""
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


def test_a_run_without_a_logged_start_is_not_sent_yet(tmp_path: Path) -> None:
    """The thread that sends to MLflow may read between a run's creation and its first entry."""
    start = Start("run", virtual=True)
    sender = Sender(RecordFolder(tmp_path), start, None, system_metrics=False)
    sender.send(Store(f"sqlite:///{tmp_path}/mlflow.db", "suite"), lambda: None)
    assert not (tmp_path / "mlflow.db").exists()


def test_a_backlog_of_any_size_is_sent(tmp_path: Path) -> None:
    """MLflow limits a request's metrics, params and tags, and how many all of them are."""
    store = Store(f"sqlite:///{tmp_path}/mlflow.db", "suite")
    store.connect()
    run_id = store.create_run("run", {}, 0)
    rows = [MetricRow("loss", 1.0, 0, step) for step in range(1, 2003)]
    names = {f"name{index}": "x" for index in range(201)}
    store.log(run_id, rows, names, names)
    found = store.resume_run(run_id)
    assert found is not None
    assert (names.items() <= found.params.items(), names.items() <= found.tags.items()) == (True, True)
    assert found.last_steps["loss"] == 2002


def test_folders_that_vanish_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in /proc, where making one says that there is no such place."""

    def vanish(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.mkdir", vanish)
    assert RecordFolder.of_name("run", Path("/proc")).path is None
