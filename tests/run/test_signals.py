"""Ctrl-C, SIGTERM and SIGHUP while nothing is trained: the run is recorded as far as it came, with its end."""

import itertools
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipebench import interrupts
from pipebench.cli import ls
from pipebench.cli.main import cli
from pipebench.run import drawings, one_process
from pipebench.run.recorder import RunRecorder
from pipebench.show import console
from pipebench.tracking.results import RecordedRuns
from tests.recipes import uniform_recipe

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
MOMENTS: dict[str, tuple[Any, str]] = {
    "before the run has a result": (one_process, "simulate"),
    "before its result is recorded": (RunRecorder, "_completed"),
    "while it is drawn": (drawings, "record_run"),
}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handles_sighup: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "small.yaml").write_text(uniform_recipe(2, 16, 8, 8, "mode: gpipe, plan: 1-1"))


def send(number: signal.Signals) -> Callable[..., None]:
    def sends(*args: object, **options: object) -> None:
        os.kill(os.getpid(), number)
        threading.Event().wait()  # for the signal

    return sends


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["run", "small.yaml", "engine.kind=simulated", *words])


def statuses() -> dict[str, str]:
    with closing(sqlite3.connect("mlflow.db")) as store:
        return dict(store.execute("select name, status from runs where end_time is not null"))


# By Ctrl-C at every moment, and by the other signals, which are handled alike, at the first.
OFTEN = {*itertools.product(MOMENTS, [signal.SIGINT]), *itertools.product([*MOMENTS][:1], CODES)}


@pytest.mark.parametrize(
    ("moment", "number"),
    [pytest.param(*it, marks=() if it in OFTEN else pytest.mark.slow) for it in itertools.product(MOMENTS, CODES)],
)
def test_a_run_is_recorded_as_far_as_it_came(
    moment: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*MOMENTS[moment], send(number))
    before = signal.getsignal(number)
    done = run()
    assert (done.exit_code, signal.getsignal(number)) == (CODES[number], before)
    assert "Traceback" not in done.output
    has_result = moment != "before the run has a result"
    assert statuses() == {"gpipe straight, seed 0": "FINISHED" if has_result else "KILLED"}
    (recorded,) = RecordedRuns().past()
    loaded = recorded.load()
    assert (loaded is not None) == has_result
    assert loaded is None or (loaded.result.name, loaded.result.outcome) == ("small", "completed")
    assert not list(Path().glob("pipebench-results/*"))


def test_sigterm_between_runs_closes_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "print_position", send(signal.SIGTERM))
    done = run("parallelism.mode=gpipe,pipedream", "parallelism.plan=1-1")
    assert done.exit_code == 143
    assert [*statuses().values()] == ["KILLED"]


@pytest.mark.parametrize("failure", [AttributeError("module 'numpy' has no attribute 'iterable'"), SystemExit(1)])
def test_errors_after_a_swallowed_ctrl_c_are_not_failures(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch swallows what is raised while it imports numpy, which is only half there from then on."""

    def swallow(*args: object, **options: object) -> None:
        with suppress(KeyboardInterrupt):
            interrupts._end(signal.SIGINT, None)
        raise failure

    monkeypatch.setattr(ls.ls, "callback", swallow)
    done = CliRunner().invoke(cli, ["ls"])
    assert (done.exit_code, done.output) == (130, "")
    monkeypatch.undo()
    assert CliRunner().invoke(cli, ["ls", "modes"]).exit_code == 0
    assert CliRunner().invoke(cli, ["ls", "nothing"]).exit_code == 2
