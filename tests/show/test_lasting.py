"""Messages on work that takes long; timers are replaced by ones that fire at once or never."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipebench.distributed.launch_join import PeerLostError
from pipebench.recipe.load import load_mapping
from pipebench.run import processes
from pipebench.run.runner import run_all
from pipebench.run.suite import Suite
from pipebench.show import progress
from tests.recipes import uniform_recipe


class Elapsed:
    """A timer whose time is over when it starts."""

    daemon = False

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        assert seconds == 2.0
        self.start, self.cancels = function, 0

    def cancel(self) -> None:
        self.cancels += 1


class Pending(Elapsed):
    """A timer whose time is never over."""

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        super().__init__(seconds, lambda: None)


def test_long_work_is_reported_once_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Elapsed] = []

    def timer(seconds: float, function: Callable[[], None]) -> Elapsed:
        made.append(Elapsed(seconds, function))
        return made[-1]

    monkeypatch.setattr(progress, "Timer", timer)
    with progress.lasting("vgg\x1b", "measuring layers"):
        assert capsys.readouterr() == ("", "vgg\\x1b  measuring layers\n")
        assert [each.cancels for each in made] == [0]
    assert [each.cancels for each in made] == [1]
    with progress.lasting("vgg", "measuring layers", shown=False):
        pass
    monkeypatch.setattr(progress, "Timer", Pending)
    with progress.lasting("vgg", "measuring layers"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("rank", "message"), [("0", "small  waiting for all workers to join\n"), ("1", "")])
def test_a_run_that_waits_for_workers_reports_it_once(
    rank: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone(*_: Any, **__: Any) -> None:
        raise PeerLostError("nobody came")

    monkeypatch.setattr(progress, "Timer", Elapsed)
    monkeypatch.setattr(processes, "join", alone)
    monkeypatch.setenv("RANK", rank)
    given = yaml.safe_load(uniform_recipe(2, 16, 8, 8, "mode: dp"))
    (loaded,) = load_mapping({**given, "cluster": {"name": "local", "count": 2}, "engine": {"kind": "distributed"}})
    with pytest.raises(PeerLostError, match="nobody came"):
        processes.work(loaded, Suite("tiny"))
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("brief", "message"), [(False, "small  simulating\nsmall  drawing pictures and recording the run\n"), (True, "")]
)
def test_a_simulated_run_reports_that_it_is_recorded(
    brief: bool, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A run printed nothing for up to ten seconds before its result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "Timer", Elapsed)
    given = yaml.safe_load(uniform_recipe(2, 16, 8, 8, "mode: dp"))
    (loaded,) = load_mapping({**given, "engine": {"kind": "simulated"}, "train": {**given["train"], "target": None}})
    run_all([loaded], Suite("tiny", brief=brief), seeds=None)
    assert capsys.readouterr().err == message
