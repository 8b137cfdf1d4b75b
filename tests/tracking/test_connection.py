"""Messages about stores that can't be opened, written or locked, or whose answers are empty, and how soon they come."""

import errno
import os
from pathlib import Path

import pytest

from pipebench.errors import UserError
from pipebench.files import FileLock
from pipebench.tracking import connection
from pipebench.tracking.connection import default_uri, reason_of
from pipebench.tracking.record import LogEntry, RecordFolder, Sent, Start
from pipebench.tracking.results import RecordedRuns, find_runs, past_runs
from pipebench.tracking.run_log import Tracking
from pipebench.tracking.store import Store
from tests.tracking.records import RESULT

OUT_OF_DATE = (
    "Detected out-of-date database schema (found version cc1f77228345, but expected dc11669786a5). Take a backup of "
    "your database, then run 'mlflow db upgrade <database_uri>' to migrate your database to the latest schema."
)
NO_FOLDERS = (
    "The filesystem tracking backend (e.g., './mlruns') is in maintenance mode and will not receive further updates. "
    "Please migrate to a database backend. If the filesystem backend is required for your workflow, set "
    "`MLFLOW_ALLOW_FILE_STORE=true` to opt out of this exception."
)


@pytest.mark.parametrize("given", ["localhost:5000", "127.0.0.1:5000/", "tracking.my-team.org:80/mlflow"])
def test_a_server_s_address_without_a_scheme_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Runs were trained, and MLflow then took the address for a folder, or a model registry of an unknown kind."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    with pytest.raises(UserError, match=f"got '{given}', allowed is an address with its scheme: http://{given}"):
        default_uri()


@pytest.mark.parametrize(
    "given", ["sqlite://", "sqlite:///:memory:", "sqlite://runs.db", "sqlite:runs.db", "sqlite:///"]
)
def test_sqlite_s_address_needs_a_file(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Runs recorded in memory were gone with the command; two slashes were an error only after training."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    with pytest.raises(UserError, match=f"got '{given}', allowed is sqlite:///FILE, with a fourth slash"):
        default_uri()


@pytest.mark.parametrize(
    "given", ["http://localhost:5000 ", "databricks", "sqlite:////tmp/a:1", "uc:profile", "./a:1b"]
)
def test_other_addresses_are_taken_without_blanks_around_them(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert default_uri() == given.strip()


def test_a_server_with_empty_answers_counts_as_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a proxy's empty answers of status 200, runs had empty ids, and counted as sent."""
    store = Store("http://127.0.0.1:1", "suite")
    monkeypatch.setattr(store, "_experiment", lambda client: "")
    monkeypatch.setattr("pipebench.tracking.store._add_tags", lambda *_: None)
    with pytest.raises(ConnectionError, match="its answers are empty"):
        store.connect()
    assert not store.is_connected


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where MLflow would wait before it tries again."""
    monkeypatch.setattr("mlflow.store.db.utils.time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))


@pytest.mark.usefixtures("impatient")
def test_a_database_that_does_not_open_is_reported_at_once(tmp_path: Path) -> None:
    """MLflow tried for 100 s, and the end of a run waited for it."""
    (tmp_path / "mlflow.db").mkdir()
    (tmp_path / "mlflow.db" / "file").touch()  # of a size on every file system
    with pytest.raises(UserError, match=r"can't be read: (unable to open database|disk I/O)"):
        RecordedRuns(f"sqlite:///{tmp_path}/mlflow.db").past()


def test_a_read_only_database_is_read(tracking: Tracking, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colleague's runs couldn't be listed: the lock beside the database couldn't be made."""
    runs, writable = RecordedRuns(f"sqlite:///{folder}/mlflow.db"), [False]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(connection, "FileLock", refuse)
    monkeypatch.setattr(os, "access", lambda *_: writable[0])
    runs.past()
    writable[0] = True
    with pytest.raises(UserError, match="Read-only file system"):
        runs.past()


def test_a_lock_that_a_suspended_process_holds_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow.db").write_text("-")
    monkeypatch.setattr(connection, "_TURN_LIMIT_S", 0.1)
    message = f"another process has held {tmp_path}/mlflow.db.lock for 0 s; Ctrl-Z may have stopped it"
    with FileLock(tmp_path / "mlflow.db.lock"), pytest.raises(UserError, match=message):
        RecordedRuns(f"sqlite:///{tmp_path}/mlflow.db").past()


def test_runs_on_this_disk_are_found_without_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that was down kept runs from being compared whose records were there."""
    (tmp_path / "mlflow.db").write_text("no database, but a file")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(UserError, match="can't be read: file is not a database"):
        past_runs([])
    folders = [tmp_path / name / "record" for name in ("one-12345678", "two-12345678")]
    for each in folders:
        RecordFolder(each).append(LogEntry(start=Start("run", virtual=True), result=RESULT))
        RecordFolder(each).write_sent(Sent("0" * 32, 1))
    found = find_runs(["one", "two-12345678"], folders)
    assert [(run.run_id, run.result) for run in found] == [(each.parent.name, RESULT) for each in folders]
    assert capsys.readouterr().err.endswith("not a database; only runs with a record on this disk are found\n")


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (OUT_OF_DATE, "back it up and run `mlflow db upgrade` with this address, or use the version that made it"),
        (NO_FOLDERS, "set MLFLOW_TRACKING_URI to sqlite:///FILE, or MLFLOW_ALLOW_FILE_STORE to true"),
    ],
)
def test_mlflow_s_advice_is_not_cut(message: str, advice: str) -> None:
    assert reason_of(RuntimeError(message)).endswith(advice)
