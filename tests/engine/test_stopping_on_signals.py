"""Ctrl-C on the virtual clock: the run drains, writes a checkpoint, prints how to resume, and can be resumed."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.engine.admission import STOPPING, StopRequest, stopping_on_signals
from pipebench.interrupts import RaisedBySignals
from reports.studies.watched_run import recorded
from tests.checkpoint.spoiling import RECIPE
from tests.commands import CopiedRun
from tests.patience import PATIENCE_S


@pytest.mark.usefixtures("handles_sighup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    stop, before = StopRequest(), signal.getsignal(number)
    with stopping_on_signals(stop):
        signal.raise_signal(number)
        assert stop.reason == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
    assert capsys.readouterr().err == f"{STOPPING}\n"


IN_IMPORTLIB = """
import signal
def _get_module_lock(number):
    signal.raise_signal(number)
    return "locked and released"
"""


@pytest.mark.parametrize("stops", [True, False])
def test_a_signal_while_an_import_holds_its_lock_ends_after_the_import(stops: bool) -> None:
    """0.2.0: a second Ctrl-C while MLflow was being imported left Python's lock of imports locked, and the run hung."""
    made: dict[str, Any] = {}
    exec(compile(IN_IMPORTLIB, "<frozen importlib._bootstrap>", "exec"), made)
    stop = StopRequest("interrupted")
    with stopping_on_signals(stop) if stops else RaisedBySignals():
        number = signal.SIGINT if stops else signal.SIGTERM
        assert made["_get_module_lock"](number) == "locked and released"
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(PATIENCE_S)


def test_an_ignored_signal_stays_ignored() -> None:
    stop = StopRequest()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stopping_on_signals(stop):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.reason is None


def test_a_stopped_run_writes_a_checkpoint_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C; `cli/test_hang_up.py` closes the terminal."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    words = ("small.yaml", "train.checkpoint_every=null", "train.max_epochs=100000")
    with CopiedRun(tmp_path, words) as run:
        assert run.wait_until(lambda: "epoch 1" in run.output, PATIENCE_S, "the first evaluation")
        run.signal(signal.SIGINT, [run.process.pid])
        assert run.wait(PATIENCE_S) == 130, run.output
        assert run.run_folder is not None
        run_id, step = run.run_folder.name, max(run.steps())
        hint = f"pipebench: its checkpoints are kept: pipebench run --resume {run_id}"
        assert run.output.splitlines().count(hint) == 1
        assert run.output.count(STOPPING) == 1
        assert f"interrupted after {step * 500:,} samples" in run.output
    (before,) = recorded(tmp_path)["runs"]
    assert before["status"] == "KILLED"

    epochs = step // 8 + 2
    monkeypatch.chdir(tmp_path)
    resumed = CliRunner().invoke(cli, ["run", "--resume", run_id, f"train.max_epochs={epochs}"])
    assert resumed.exit_code == 0, resumed.output
    assert f"trained {epochs} epochs" in resumed.output
    assert max(run.steps()) == 8 * epochs
    record = recorded(tmp_path)
    (after,) = record["runs"]
    assert (after["id"], after["status"]) == (before["id"], "FINISHED")
    assert [samples for samples, _ in record["metrics"]["curves/top1"]] == [4000 * (each + 1) for each in range(epochs)]
