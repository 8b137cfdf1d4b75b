import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import pipebench.run
from pipebench.cli import group
from pipebench.cli.main import cli
from pipebench.errors import PlanError, ScheduleError, WorkersFailedError
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.suite import Suite
from tests.patience import PATIENCE_S, without_phases
from tests.recipe.conftest import VALID
from tests.support import raise_as_ours


class FakeRunner(types.ModuleType):
    """Stands in for `pipebench.run.runner`: records its calls."""

    def __init__(self) -> None:
        super().__init__("pipebench.run.runner")
        self.calls: list[dict[str, Any]] = []
        self.answer: int | BaseException = 0

    def run_recipes(self, loaded: list[LoadedRecipe], suite: Suite, **options: Any) -> int:
        asked = {"suite": suite.name, "verbose": suite.verbose, "overrides": suite.overrides}
        self.calls.append({"names": [each.recipe.name for each in loaded], "loaded": loaded, **asked, **options})
        if isinstance(self.answer, BaseException):
            raise_as_ours(self.answer)
        return self.answer

    def draw(self, loaded: LoadedRecipe, *, versions: bool) -> str:
        return f"a picture of {loaded.recipe.name}{' with versions' if versions else ''}"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    fake = FakeRunner()
    monkeypatch.setitem(sys.modules, "pipebench.run.runner", fake)
    monkeypatch.setattr(pipebench.run, "runner", fake, raising=False)  # where another test has imported it
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def python(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options
    )


def test_run_one(runner: FakeRunner) -> None:
    assert invoke("run", "quickstart", "train.seed=3", "--verbose").exit_code == 0
    [call] = runner.calls
    assert (call["names"], call["seeds"], call["verbose"], call["suite"]) == (["quickstart"], None, True, "quickstart")
    assert call["loaded"][0].recipe.train.seed == 3


def test_run_several_with_options_anywhere(runner: FakeRunner) -> None:
    arguments = ["run", "quickstart/dp", "--seeds", "2,0", "train.max_epochs=2", "quickstart/model"]
    assert invoke(*arguments).exit_code == 0
    [call] = runner.calls
    assert (call["names"], call["seeds"], call["suite"]) == (
        ["quickstart-dp", "quickstart-model"],
        (2, 0),
        "quickstart",
    )
    assert [each.recipe.train.max_epochs for each in call["loaded"]] == [2, 2]


def test_run_a_folder(runner: FakeRunner) -> None:
    assert invoke("run", "recipes/quickstart").exit_code == 0
    [call] = runner.calls
    assert call["names"] == ["quickstart-dp", "quickstart-gpipe", "quickstart-model", "quickstart-pipedream"]
    assert call["suite"] == "quickstart"


@pytest.mark.parametrize("kind", [PlanError, ScheduleError, KeyError, click.UsageError])
def test_no_output_has_terminal_control_characters(runner: FakeRunner, kind: type[Exception]) -> None:
    runner.answer = kind("the model's \x1b, \x85, \u2028, \ud800 and \r")
    said = invoke("run", "quickstart").stderr.split("\n")
    assert all(line.isprintable() for line in said)
    assert "pipebench: error: " in said[0] or kind is not PlanError
    assert any("the model's \\x1b, \\x85, \\u2028, \\ud800 and \\r" in line for line in said) or kind is KeyError


def test_a_path_with_an_equals_sign_is_a_path(runner: FakeRunner, folder: Path) -> None:
    (folder / "a=b.yaml").write_text(VALID)
    assert invoke("run", "a=b.yaml", "name=x").exit_code == 0
    assert runner.calls[0]["names"] == ["x"]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (0, 0),
        (1, 1),
        (130, 130),
        (PlanError("no"), 2),
        (WorkersFailedError(3), 3),
        (ScheduleError("circle"), 3),
        (KeyboardInterrupt(), 130),
        (KeyError("x"), 3),
    ],
)
def test_exit_codes(runner: FakeRunner, answer: int | BaseException, code: int) -> None:
    runner.answer = answer
    result = invoke("run", "quickstart")
    assert result.exit_code == code
    assert ("Traceback" in result.stderr) == (code == 3 and not isinstance(answer, WorkersFailedError))
    if code == 2:
        assert result.stderr == "pipebench: error: no\n"


def test_nothing_runs_when_one_recipe_is_wrong(runner: FakeRunner) -> None:
    result = invoke("run", "quickstart", "quickstart/dp", "no-such", "parallelism.microbatches=3")
    assert result.exit_code == 2
    assert runner.calls == []
    where, allowed = (
        "command line: parallelism.microbatches: got 3",
        (
            "allowed is 1, or mode gpipe or pipedream-flush or interleaved or zero-bubble or zbv or dualpipev or "
            "dualpipe or xpipe"
        ),
    )
    assert result.stderr.splitlines() == [
        f"pipebench: error: {where}, mode pipedream has no flush here: {allowed}",
        f"pipebench: error: {where}, mode dp doesn't cut minibatches: {allowed}",
        "pipebench: error: no-such: no such file, folder or short name",
    ]


def test_preflight_comes_before_running(runner: FakeRunner) -> None:
    result = invoke("run", "quickstart", "engine.timing=gone.json")
    assert result.exit_code == 2
    assert "engine.timing: the profile file 'gone.json' can't be read" in result.stderr
    assert runner.calls == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "name at least one recipe"),
        (["run", "train.seed=1"], "name at least one recipe"),
        (["run", "quickstart", "quickstart"], "got 'quickstart', which recipes/quickstart.yaml is named already"),
        (["run", "quickstart", "--seeds", "1,x"], "--seeds: got '1,x', allowed are different whole numbers"),
        (["run", "quickstart", "--seeds", "1,1"], "--seeds: got '1,1'"),
        (["run", "quickstart", "--sedes", "1"], "No such option '--sedes'; did you mean '--seeds'?"),
        (["run", "quickstart", "--lr", "0.1"], "'--lr'; did you mean 'train.optimizer.lr'? Keys have no dashes: KEY="),
        (["plan", "quickstart", "--batch-size", "32"], "No such option '--batch-size'; did you mean 'train.minibatch"),
        (["run", "quickstart", "--train.seed=3"], "'--train.seed'; did you mean 'train.seed'? Keys have no dashes"),
        (["run", "quickstart", "train.seed:3"], "train.seed is a key of recipes, which needs a value: train.seed=3"),
        (["run", "quickstart", "--quiet"], "No such option '--quiet'. Keys have no dashes: KEY=VALUE."),
        (["runs", "--lr"], "No such option '--lr'."),
        (["show", "quickstart", "quickstart/dp"], "one recipe is needed, got 2"),
        (["show", "quickstart", "train.seed"], "train.seed is a key of recipes, which needs a value: train.seed=VALUE"),
        (["run", "quickstart", "train.seed"], "train.seed is a key of recipes, which needs a value: train.seed=VALUE"),
        (
            ["run", "quickstart", "train.schedule={name:", "cosine}", "train.seed=1"],
            "got 'train.schedule={name:', which the shell has cut at a space: put it in quotes, 'train.schedule={name:",
        ),
        (
            ["show", "cluster-a", "cluster.servers=2", "memory=1GB"],
            "changed in a recipe: pipebench show RECIPE cluster.name=cluster-a cluster.servers=2 cluster.memory=1GB",
        ),
        (
            ["run", "quickstart", "train.seed=3", "--seeds", "1,2"],
            "command line: train.seed: got 3, and seeds 1, 2 replace it in every run: leave out one of the two",
        ),
        (
            ["run", "quickstart", "train.seed=0,1", "--seeds", "0,1"],
            "command line: train.seed: got a list, and seeds 0",
        ),
        (["ls", "model"], "cost-models, recipes; did you mean 'models'?"),
        (
            ["draw", "quickstart", "--of", "memry"],
            "--of: got 'memry', allowed are memory, occupancy; did you mean 'memory'",
        ),
        (["rnu"], "No such command 'rnu'; did you mean 'run'?"),
        (["ui", "--port", "0"], "--port: 0 is not in the range"),
    ],
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_show_prints_a_recipe(folder: Path) -> None:
    shown = invoke("show", "quickstart/gpipe", "train.seed=5")
    (folder / "again.yaml").write_text(shown.stdout)
    assert shown.exit_code == 0
    assert invoke("show", "again.yaml").stdout == shown.stdout
    assert "seed: 5\n" in shown.stdout


def test_draw(runner: FakeRunner) -> None:
    assert invoke("draw", "quickstart").stdout == "a picture of quickstart\n"
    assert invoke("draw", "quickstart", "--versions").stdout == "a picture of quickstart with versions\n"


def test_ls() -> None:
    result = invoke("ls")
    assert [line for line in result.stdout.splitlines() if line.endswith(":")] == [
        "models:", "datasets:", "optimizers:", "schedules:", "clusters:", "modes:", "cost-models:", "recipes:",
    ]  # fmt: skip
    for name in ("vgg16", "mnist5k", "cluster-a", "pipedream-flush", "quickstart/gpipe"):
        assert f"\n  {name} " in result.stdout
    assert all(len(line.split(maxsplit=1)) == 2 for line in invoke("ls", "recipes").stdout.splitlines())


def test_help_has_examples_and_imports_little() -> None:
    code = "import sys, pipebench.cli.main as c; c.cli(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    result = python("-c", code)
    assert result.returncode == 0
    assert "pipebench run recipes/quickstart" in result.stdout
    modules = result.stdout.splitlines()[-1]
    assert not {"'torch'", "'mlflow'", "'omegaconf'", "'rich'"} & set(modules.strip("[]").split(", "))


@pytest.mark.parametrize("command", ["run", "show", "draw", "ls", "ui"])
def test_help_of_commands(command: str) -> None:
    assert invoke(command, "--help").exit_code == 0


def test_the_module_prints_its_version() -> None:
    assert python("-m", "pipebench", "--version").stdout == f"pipebench, version {pipebench.__version__}\n"


def test_a_closed_pipe_causes_no_traceback() -> None:
    """As in `pipebench ls modes | head -0`: the pipe is closed before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pipebench", "ls", "modes"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    os.close(writer)
    assert (without_phases(result.stderr), result.returncode) == ("", 141)


def test_a_pipe_that_breaks_inside_is_a_failure(runner: FakeRunner) -> None:
    runner.answer = BrokenPipeError("a worker died")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipebench.cli.group._reader_is_gone", lambda: False)
        answer = invoke("run", "quickstart")
    assert answer.exit_code == 3
    assert "a worker died" in answer.stderr


def test_ls_lists_every_kind() -> None:
    lines = CliRunner().invoke(cli, ["ls", "recipes", "GNMT16"]).output.splitlines()
    assert lines
    assert all("gnmt" in line.lower() for line in lines)
    assert CliRunner().invoke(cli, ["ls", "models", "vgg"]).output.splitlines()[0].startswith("vgg16")


def test_a_slow_command_prints_what_it_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its output is read by: a line on the standard error, once it takes long, unless that is no file."""

    class Late:
        daemon = False

        def __init__(self, after_s: float, tell: Callable[[], None]) -> None:
            self.tell = tell

        def start(self) -> None:
            calls.append(self.tell)

        def cancel(self) -> None:
            calls.append(self.cancel)

    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(group, "Timer", Late)
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        assert cli.main(["ls", "modes"], standalone_mode=False) == 0
    monkeypatch.undo()
    assert len(calls) == 2
    calls[0]()
    assert capsys.readouterr().err.startswith("pipebench ls: ")
    assert group._what_is_loading({"torch", "mlflow"}) == "loading mlflow"
    assert group._what_is_loading(set[str]()) == "starting"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ls", "nothere"], "pipebench: error: got 'nothere', allowed are models, datasets"),
        (["ui", "--port", "0"], "pipebench: error: --port: 0 is not in the range 1<=x<=65535."),
        (["export", "run", "--step", "x"], "pipebench: error: --step: 'x' is not a valid integer range."),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_in_one_line(words: list[str], sentence: str) -> None:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("name", "hint"), [("nothere.yaml", ""), ("bsae.yaml", "; did you mean 'base.yaml'?")])
def test_a_file_is_not_suggested_for_its_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("r.yaml", "base.yaml"):
        Path(file).write_text(f"extends: {name}\n")
    result = CliRunner().invoke(cli, ["show", "r.yaml"])
    assert result.exit_code == 2
    assert result.stderr.strip().endswith(f"{name}: no such file, folder or short name{hint}")
