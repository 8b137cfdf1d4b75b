"""Runs whose process was killed: RUNNING in MLflow until a later command sends their rest and their end."""

import os
import re
import signal
import socket
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.errors import UserError
from pipebench.tracking import orphaned, record
from pipebench.tracking.connection import default_uri
from pipebench.tracking.orphaned import close_orphaned
from pipebench.tracking.record import LogEntry, RecordFolder, Start, read_record
from pipebench.tracking.results import RecordedRuns
from pipebench.tracking.run_log import Tracking
from pipebench.train.result import Point
from tests.commands import run_code
from tests.patience import PATIENCE_S
from tests.recipes import uniform_recipe
from tests.results import DP

# Logs two points and is killed once MLflow has the first; of the second only the record knows.
KILLED = """\
import os, signal, sys, time
from pathlib import Path
from pipebench.tracking.run_log import Tracking
from pipebench.train.result import Point
folder = Path(sys.argv[1]) if sys.argv[1:] else None
tracking = Tracking("left")
parent = tracking.start("parent", params={}, tags={"kind": "comparison"})
run = tracking.start("child", params={"name": "small"}, tags={"kind": "run"}, parent=parent, folder=folder)
run.point(Point(samples=10, clock_s=1.0, metrics={"top1": 0.5}))
while not run._sender.is_empty:
    tracking.wake()
    time.sleep(0.01)
run._sender.send = lambda *_: None
run.point(Point(samples=20, clock_s=2.0, metrics={"top1": 0.75}))
os.kill(os.getpid(), signal.SIGKILL)
"""
BOTH = {"parent": "KILLED", "child": "KILLED"}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def kill(*folder: str) -> None:
    done = run_code(KILLED, Path.cwd(), *folder)
    assert done.returncode < 0, done.stderr
    assert statuses() == {"parent": "RUNNING", "child": "RUNNING"}


def statuses() -> dict[str, str]:
    with closing(sqlite3.connect("mlflow.db", timeout=PATIENCE_S)) as store:
        return dict(store.execute("select name, status from runs where name not like 'gpipe%'"))


def points() -> list[tuple[int, float]]:
    with closing(sqlite3.connect("mlflow.db")) as store:
        return store.execute("select step, value from metrics where key = 'curves/top1' order by step").fetchall()


def test_a_list_of_runs_closes_runs_of_killed_processes() -> None:
    kill()
    assert len(list(Path("pipebench-results").iterdir())) == 2
    listed = CliRunner().invoke(cli, ["runs"])
    assert listed.exit_code == 0
    assert "running" not in listed.output
    assert listed.output.count("killed") == 2
    assert statuses() == BOTH
    assert points() == [(10, 0.5), (20, 0.75)]
    assert not Path("pipebench-results").exists()


def test_the_next_run_closes_runs_of_killed_processes() -> None:
    kill("pipebench-runs/child-12345678/record")
    Path("small.yaml").write_text(uniform_recipe(2, 16, 8, 8, "mode: gpipe, plan: 1-1"))
    assert CliRunner().invoke(cli, ["run", "small.yaml", "engine.kind=simulated"]).exit_code == 0
    assert statuses() == BOTH
    assert points() == [(10, 0.5), (20, 0.75)]
    record = read_record(Path("pipebench-runs/child-12345678/record"))
    assert record is not None
    assert record.status == "KILLED"


@pytest.mark.parametrize(
    ("outcome", "status"), [("missed", "FINISHED"), ("diverged", "FAILED"), ("interrupted", "KILLED")]
)
def test_a_run_that_was_killed_after_its_result_ends_as_that_says(outcome: str, status: str) -> None:
    """One that a second Ctrl-C ended while it drew pictures was recorded as killed."""
    Tracking("left").start("parent", params={}, tags={}).finish(status="FINISHED")
    folder = Path("pipebench-runs/child-12345678/record")
    killed = RecordFolder(folder)
    killed.append(LogEntry(start=Start("child", virtual=True, suite="left")))
    killed.append(LogEntry(result=replace(DP, outcome=outcome)))
    killed.release()
    close_orphaned(default_uri(), [folder])
    assert statuses() == {"parent": "FINISHED", "child": status}


@pytest.mark.parametrize("refused", ["parent", "child"])
def test_a_run_that_mlflow_refuses_does_not_delay_others(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    kill()
    close = orphaned._close

    def closes_the_other(folder: Path, *others: Any) -> None:
        if folder.name.startswith(refused):
            raise OSError(refused)
        close(folder, *others)

    monkeypatch.setattr(orphaned, "_close", closes_the_other)
    close_orphaned(default_uri(), Path("pipebench-results").iterdir())
    assert statuses() == BOTH | {refused: "RUNNING"}


def test_locked_and_closed_records_and_those_of_other_stores_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    kill()
    folders = [*Path("pipebench-results").iterdir()]
    held = [RecordFolder(folder) for folder in folders]
    close_orphaned(default_uri(), folders)
    assert set(statuses().values()) == {"RUNNING"}
    for each in held:
        each.release()
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
        close_orphaned(default_uri(), folders)
        assert not Path("other.db").exists()
    with closing(sqlite3.connect("mlflow.db")) as store, store:
        store.execute("update runs set status = 'FAILED' where name = 'child'")
    close_orphaned(default_uri(), folders)
    assert statuses() == {"parent": "KILLED", "child": "FAILED"}


def test_a_forked_process_holds_no_lock(tmp_path: Path) -> None:
    record = RecordFolder(tmp_path / "record")
    readable, writable = os.pipe()
    copy = os.fork()
    if copy == 0:
        os.write(writable, b".")
        signal.pause()
    try:
        os.read(readable, 1)
        record.release()
        assert RecordFolder(tmp_path / "record", exclusive=True).path is not None
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)
        for each in (readable, writable):
            os.close(each)


def test_the_wait_for_a_record_of_a_suspended_command_is_limited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While Ctrl-Z stopped `pipebench runs`, `run --resume` and the end of a comparison waited without a message."""
    tracking = Tracking("left")
    parent = tracking.start("parent", params={}, tags={})
    folder = Path("pipebench-runs/child-12345678/record")
    left_record = RecordFolder(folder)
    left_record.append(LogEntry(start=Start("child", virtual=True)))
    left_record.release()
    monkeypatch.setattr(record, "_PATIENCE_S", 0.1)
    closing_it = RecordFolder(folder, exclusive=True)
    message = f"{folder}: process {os.getpid()} on {socket.gethostname()} holds it, to send it to MLflow, and hasn't"
    with pytest.raises(UserError, match=re.escape(message)):
        tracking.start("child", params={}, tags={}, folder=folder)
    parent.metrics({"speedup_over_dp": 2.0}, about=folder)
    assert capsys.readouterr().err.startswith(f"pipebench: speedup_over_dp: not recorded: {message}")
    closing_it.release()
    parent.metrics({"speedup_over_dp": 2.0}, about=folder)
    assert [each.metrics for each in RecordFolder(folder).earlier("metrics")] == [{"speedup_over_dp": 2.0}]
    parent.finish(status="FINISHED")


def test_a_comparison_ends_after_a_run_whose_end_was_not_awaited() -> None:
    tracking = Tracking("left")
    parent = tracking.start("parent", params={}, tags={"kind": "comparison"})
    child = tracking.start("child", params={}, tags={"kind": "run"}, parent=parent)
    with pytest.MonkeyPatch.context() as patch:

        def interrupted() -> bool:
            raise KeyboardInterrupt

        patch.setattr(child, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            child.finish(status="KILLED")
    parent.finish(status="KILLED")
    assert statuses() == BOTH


def test_runs_missing_in_mlflow_are_sent_when_it_answers() -> None:
    """They stayed on disk for good: nothing said of which experiment and comparison they were."""
    tracking = Tracking("unknown")
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_: object) -> str:
            raise ConnectionError("no server")

        patch.setattr(tracking.store, "create_run", fail)
        parent = tracking.start("seeds 0, 1", params={}, tags={"kind": "seeds"})
        child = tracking.start("child", params={"name": "small"}, tags={"kind": "run"}, parent=parent)
        child.point(Point(samples=10, clock_s=1.0, metrics={"top1": 0.5}))
        child.finish(status="FINISHED")
        ended_ms = child._sender._end_ms
        time.sleep(0.005)
        parent.metrics({"speedup_over_dp": 2.0}, about=child.run_id or child.folder)
        parent.finish(status="FINISHED")
        assert child.where() == "pipebench-results/child-1/ (MLflow did not take it)"
    other = tracking.start("seeds 0, 1", params={}, tags={"kind": "seeds"})
    other.finish(status="FINISHED")
    close_orphaned(default_uri(), [*Path("pipebench-results").iterdir()])
    assert not Path("pipebench-results").exists()
    assert points() == [(10, 0.5)]
    with closing(sqlite3.connect("mlflow.db")) as store:
        found = "select name, value, end_time from runs natural join metrics where key = 'speedup_over_dp'"
        assert store.execute(found).fetchall() == [("child", 2.0, ended_ms)]
    (run,) = [run for run in RecordedRuns().past() if run.kind == "run"]
    (above,) = [each for each in RecordedRuns().past() if each.ids[0] == run.parent_id]
    assert above.names == ("seeds 0, 1",)
    assert above.ids[0] != other.run_id
    assert (above.outcome, run.outcome, run.began_ms) == ("finished", "finished", child.key and child.key.at_ms)


def test_releasing_a_record_twice_releases_no_other() -> None:
    """The system gives a closed file's number to the next one."""
    first = RecordFolder(Path("first"))
    assert first._file_lock is not None
    number = first._file_lock._descriptor
    first.release()
    second = RecordFolder(Path("second"))
    assert second._file_lock is not None
    assert second._file_lock._descriptor == number
    first.release()
    assert RecordFolder(Path("second"), exclusive=True).path is None
    second.release()
    assert RecordFolder(Path("second"), exclusive=True).path is not None
