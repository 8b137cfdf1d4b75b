"""The launcher closes the record of a run whose processes have ended without doing so."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pipebench.recipe.load import load
from pipebench.run import processes, runner
from pipebench.run.folder import RunFacts, RunFolder, create
from pipebench.run.suite import Suite
from pipebench.tracking.record import LogEntry, RecordFolder, Start
from pipebench.tracking.run_log import Tracking
from tests.patience import PATIENCE_S
from tests.tracking.records import RESULT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that began, and whose processes are gone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = create(RunFacts("run-12345678", "begun", "suite", 0, (), None, False, None), "name: begun\n")
    RecordFolder(made.record_path).append(LogEntry(start=Start("begun", virtual=False)))
    return made


def status() -> str | None:
    if not Path("mlflow.db").exists():
        return None
    with closing(sqlite3.connect("mlflow.db", timeout=PATIENCE_S)) as store:
        row = store.execute("select status from runs where name = 'begun' and end_time is not null").fetchone()
    return None if row is None else row[0]


def test_the_record_of_a_failed_run_is_closed_before_the_command_ends(folder: RunFolder) -> None:
    with Tracking("suite").following(folder.record_path) as log:
        processes.close_record(folder, log)
    assert status() == "FAILED"


def test_a_run_whose_record_was_removed_is_ended_in_mlflow(folder: RunFolder) -> None:
    """It was running there for ever: no later command had anything to close it by."""
    with Tracking("suite").following(folder.record_path) as log:
        assert log.wait_for_id() is not None
        folder.path.rename(folder.path.with_name("removed"))  # at once: MLflow's id may be being written there
        processes.close_record(folder, log)
    assert status() == "FAILED"


def test_a_run_that_failed_before_it_began_has_no_record(folder: RunFolder) -> None:
    (folder.record_path / "record.jsonl").unlink()
    with Tracking("suite").following(folder.record_path) as log:
        processes.close_record(folder, log)
    assert status() is None


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_that_ended_on_a_full_disk_is_ended_in_mlflow(ended: bool, folder: RunFolder) -> None:
    if ended:
        RecordFolder(folder.record_path).append(LogEntry(status="KILLED"))
    with Tracking("suite").following(folder.record_path) as log:
        processes.end_record(folder, RESULT, log)
    assert (folder.record_path / "record.jsonl").read_text().count("status") == 1
    assert ended or status() == "FINISHED"


def test_a_resumed_run_is_not_closed_first(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record was closed as killed in the background, and the run waited for that as long as a server took."""
    closed: list[Path] = []
    RecordFolder(Path("pipebench-results/left-1"))

    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tracking, "close_orphaned", lambda _, folders: closed.extend(folders))
    monkeypatch.setattr(runner, "_run_with_seeds", stops)
    with pytest.raises(KeyboardInterrupt):
        runner.run_all([load("quickstart")], Suite("suite", resumed=folder), seeds=None)
    assert closed == [Path("pipebench-results/left-1")]
