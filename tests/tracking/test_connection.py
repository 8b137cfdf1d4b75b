"""What is said, and how soon, of stores that can't be opened, written or locked, or whose answers are empty."""

import errno
import os
from pathlib import Path

import pytest
from filelock import FileLock

from pipebench.errors import UserError
from pipebench.tracking import Tracking, connection
from pipebench.tracking.connection import reason_of
from pipebench.tracking.results import RecordedRuns
from pipebench.tracking.store import Store
from tests.patience import within_patience

OUT_OF_DATE = (
    "Detected out-of-date database schema (found version cc1f77228345, but expected dc11669786a5). Take a backup of "
    "your database, then run 'mlflow db upgrade <database_uri>' to migrate your database to the latest schema."
)
NO_FOLDERS = (
    "The filesystem tracking backend (e.g., './mlruns') is in maintenance mode and will not receive further updates. "
    "Please migrate to a database backend. If the filesystem backend is required for your workflow, set "
    "`MLFLOW_ALLOW_FILE_STORE=true` to opt out of this exception."
)


def test_a_server_that_answers_nothing_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a proxy's empty answers with status 200 runs had empty ids, and counted as sent."""
    store = Store("http://127.0.0.1:1", "suite")
    monkeypatch.setattr(store, "_experiment", lambda client: "")
    monkeypatch.setattr("pipebench.tracking.store._add_tags", lambda *_: None)
    with pytest.raises(ConnectionError, match="its answers are empty"):
        store.connect()
    assert not store.is_connected


def test_a_database_that_does_not_open_is_told_at_once(tmp_path: Path) -> None:
    """MLflow tried for 100 s, and the end of a run waited for it."""
    (tmp_path / "mlflow.db").mkdir()
    (tmp_path / "mlflow.db" / "file").touch()  # of a size on every file system
    with within_patience(), pytest.raises(UserError, match=r"can't be read: (unable to open database|disk I/O)"):
        RecordedRuns(f"sqlite:///{tmp_path}/mlflow.db").past()


def test_a_database_that_may_only_be_read_is(tracking: Tracking, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_lock_that_a_stopped_process_holds_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow.db").write_text("-")
    monkeypatch.setattr(connection, "_TURN_LIMIT_S", 0.1)
    told = f"another process has held {tmp_path}/mlflow.db.lock for 0 s; Ctrl-Z may have stopped it"
    with FileLock(tmp_path / "mlflow.db.lock"), pytest.raises(UserError, match=told):
        RecordedRuns(f"sqlite:///{tmp_path}/mlflow.db").past()


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (OUT_OF_DATE, "back it up and run `mlflow db upgrade` with this address, or use the version that made it"),
        (NO_FOLDERS, "set MLFLOW_TRACKING_URI to sqlite:///FILE, or MLFLOW_ALLOW_FILE_STORE to true"),
    ],
)
def test_what_mlflow_advises_is_not_cut(said: str, advice: str) -> None:
    assert reason_of(RuntimeError(said)).endswith(advice)
