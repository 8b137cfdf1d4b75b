"""Code of the user's own: what it does wrong is told in a sentence with file and line, what is right runs anywhere."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from pipebench.cli.main import cli
from pipebench.errors import UserCodeError
from pipebench.recipe.load import load
from pipebench.recipe.preflight import preflight
from pipebench.recipe.targets import import_target
from pipebench.train.profiled_model import initial_model
from tests.patience import without_phases

EXAMPLE = Path(__file__).parents[2] / "docs" / "example"
CODE = """\
import os
import random

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

IN_A_WORKER = "RANK" in os.environ


class Net(nn.Module):
    def __init__(self, width: int = 8, fails: str = "", hidden: "Unknown | None" = None):
        super().__init__()
        if width < 1:
            raise ValueError(f"width is {width}")
        self.a, self.leaf, self.b = nn.Linear(2, width), Leaf(fails), nn.Linear(width, 3)
        with torch.no_grad():
            self.a.weight[0, 0] += random.random() + numpy.random.rand()

    def forward(self, x):
        return self.b(self.leaf(torch.tanh(self.a(x))))


class Leaf(nn.Module):
    one_layer = True

    def __init__(self, fails):
        super().__init__()
        self.fails, self.calls = fails, 0

    def forward(self, x):
        self.calls += 1
        if self.fails == "at once" or (self.fails == "late" and self.calls > 4 and IN_A_WORKER):
            raise ArithmeticError("tired")
        if self.fails == "exits":
            raise SystemExit(0)
        return x * 1.0


class Points(Dataset):
    def __init__(self, length, fails, at=57):
        self.length, self.fails, self.at = length, fails, at
        self.x = torch.randn(length, 2)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if self.fails == "at once" or (self.fails == "late" and i == self.at):
            raise OSError("disk is gone")
        if self.fails == "label" and i == 57:
            return self.x[i], torch.tensor(12)
        return self.x[i] if self.fails == "single" else (self.x[i], self.y[i])


def data(length: int = 100, fails: str = "", held_out: str = ""):
    return Points(length, fails), Points(20, held_out, 13)


def nothing():
    return 3


def leaves():
    raise SystemExit(0)


def right(output, target):
    return (output.argmax(1) == target).float().mean()


def num_right(output, target):
    return (output.argmax(1) == target).sum()


def broken(output, target):
    raise RuntimeError("metric broke")


def summed(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum")


def constant(output, target):
    return torch.tensor(1.0)


def falling(fraction, power: float = 1.0):
    return (1 - fraction) ** power


def negative(fraction):
    return 0.5 - fraction


class Beyond(BaseException):
    pass


def beyond():
    raise Beyond("over")


class Torn(Points):
    def __getitem__(self, i):
        if i == 57:
            raise Beyond("over") if self.fails == "beyond" else EOFError("cut short")
        return self.x[i], self.y[i]


def torn(length: int = 100, fails: str = ""):
    return Torn(length, fails), Points(20, "")


class Tiring(nn.Module):
    one_layer = True

    def __init__(self):
        super().__init__()
        self.a, self.calls = nn.Linear(2, 3), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 6 and torch.is_grad_enabled():
            raise Beyond("over")
        return self.a(x)


def tiring():
    return nn.Sequential(Tiring())


def endless(output, target):
    return output.sum() * float("nan")


def frozen():
    return nn.Linear(2, 3).requires_grad_(False)


def strayed(length: int = 100):
    points = torch.utils.data.TensorDataset(torch.randn(length, 2), torch.arange(length) % 3)
    return torch.utils.data.Subset(points, [*range(57), 1000, *range(58, length)]), Points(20, "")
"""
RECIPE = """\
name: stranger
model: {target: "strangers_things:Net"}
dataset:
  target: "strangers_things:data"
  loss: cross_entropy
  metrics: {top1: top1, right: {target: "strangers_things:right", best: max}}
train: {minibatch_size: 10, optimizer: {lr: 0.1}, max_epochs: 2}
cluster: {name: cluster-a}
parallelism: {mode: dp}
"""
OWN = "strangers_things"
_OPTIMIZER = ("train.optimizer.name=null", "train.optimizer.target=torch.optim:AdamW")
_SCHEDULE = ("train.schedule.name=null",)

REFUSED: list[tuple[Sequence[str], str]] = [
    (
        ["model.width=-1"],
        "model.target: OWN:Net can't make the model with width=-1: ValueError: width is -1 (OWN.py:16, in",
    ),
    (["model.width=abc"], "model.width: got 'abc', allowed is a whole number (OWN:Net)"),
    (
        ["model.widht=3"],
        "model.widht: unknown option, allowed are width, fails, hidden; did you mean 'width'? (OWN:Net)",
    ),
    (
        ["model.fails=at once"],
        "model.target: OWN:Net fails on 10 samples of OWN:data: ArithmeticError: tired (OWN.py:35, in",
    ),
    (
        ["model.fails=exits"],
        "OWN:Net fails on 10 samples of OWN:data: it ends the program (SystemExit) (OWN.py:37, in forw",
    ),
    (["model.target=sys:exit"], "model.target: sys:exit can't make the model: it ends the program (SystemExit)"),
    (["model.target=OWN:leaves"], "can't make the model: it ends the program (SystemExit) (OWN.py:67, in leaves)"),
    (["model.target=OWN:beyond"], "OWN:beyond can't make the model: Beyond: over (OWN.py:103, in beyond)"),
    (["dataset.target=OWN:beyond"], "dataset.target: OWN:beyond can't make the data set: Beyond: over (OWN.py:103, in"),
    (
        ["model.target=OWN:tiring"],
        "error: stranger: training, epoch 2, minibatch 9 of 10: OWN.py:127, in forward: Beyond: over",
    ),
    (
        ["dataset.target=OWN:torn", "dataset.fails=beyond"],
        "training, epoch 1, minibatch 4 of 10: OWN.py:109, in __getitem__: Beyond: over",
    ),
    (
        ["dataset.target=OWN:torn", "dataset.fails=beyond", "dataset.loader_processes=1"],
        "in a process that fetches ahead, OWN.py:109, in __getitem__: Beyond",
    ),
    (
        ["dataset.target=OWN:torn"],
        "minibatch 4 of 10: sample 57 of train can't be read: EOFError: cut short (OWN.py:109, in __getitem__)",
    ),
    (
        ["model.target=torch.nn:LazyLinear", "model.out_features=3"],
        "model.target: torch.nn:LazyLinear: the model is a LazyLinear, whose parameters have no shape before its first",
    ),
    (["model.target=torch:Tensor"], "model.target: torch:Tensor returned Tensor, needed is a torch.nn.Module"),
    (["model.target=torch:pi"], "model.target: torch:pi is a float, needed is a function or a class that makes one"),
    (
        ["model.target=OWN:Nett"],
        "model.target: OWN:Nett can't be imported: module OWN has no function Nett; did you mean 'Net'",
    ),
    (
        ["model.target=no_such.thing:f"],
        "no_such.thing:f can't be imported: ModuleNotFoundError: No module named 'no_such'",
    ),
    (["model.target=cut_short:f"], "model.target: cut_short:f can't be imported: SyntaxError: "),
    (
        ["dataset.fails=at once"],
        "OWN:data makes data that can't be used: sample 0 of train can't be read: OSError: disk is gone (OWN.py:52, in",
    ),
    (["dataset.fails=late"], "minibatch 4 of 10: sample 57 of train can't be read: OSError: disk is gone (OWN"),
    (
        ["dataset.fails=late", "dataset.loader_processes=1"],
        "in a process that fetches ahead, sample 57 of train can't be read: OSError: disk is gone (OWN.py:52,",
    ),
    (
        ["dataset.target=OWN:strayed"],
        "stranger: training, epoch 1, minibatch 4 of 10: sample 57 of train can't be read: IndexError: index 1000 is",
    ),
    (
        ["dataset.fails=label"],
        "minibatch 4 of 10: the loss fails on the output, a tensor [10, 3] float32: IndexError: Target 12 is out of",
    ),
    (
        ["dataset.fails=single"],
        "dataset.target: OWN:data makes data that can't be used: sample 0 of train is a tensor [2] floa",
    ),
    (
        ["dataset.target=OWN:nothing"],
        "dataset.target: OWN:nothing returned int, needed is a pipebench.zoo.Dataset or a pair of torch",
    ),
    (["dataset.length=x"], "dataset.length: got 'x', allowed is a whole number (OWN:data)"),
    (["dataset.length=5"], "train.minibatch_size: got 10, allowed are 1 to 5, the training samples there are"),
    (
        ["dataset.loss=null"],
        "dataset.loss: is missing, which a pair of torch data sets needs: cross_entropy, mse, model or a target",
    ),
    (
        ["dataset.loss=mse"],
        "dataset.loss: the loss of OWN:data doesn't suit the output of OWN:Net: the loss fails on the out",
    ),
    (
        ["dataset.loss=OWN:summed"],
        "dataset.loss: the loss of 10 samples is the sum of each one's, needed is their mean",
    ),
    (
        ["dataset.loss=OWN:constant"],
        "dataset.loss: the loss has no gradient: nothing in it depends on the model's parameters",
    ),
    (
        ["dataset.loss=OWN:endless"],
        "dataset.loss: the loss of 10 samples is nan at the initial weights, needed is a number: the data, OWN:Net or",
    ),
    (["model.target=torch.nn:Identity"], "model.target: torch.nn:Identity has no parameters to train: none, or none"),
    (["model.target=OWN:frozen"], "model.target: OWN:frozen has no parameters to train: none, or none with requires"),
    (
        ["dataset.metrics={right: {target: 'OWN:broken', best: max}}"],
        "the metric right fails on the output, a tensor [10, 3] float32: RuntimeError: metric broke (OWN.py:79, in",
    ),
    (
        ["dataset.held_out=late"],
        "stranger: evaluation after 1 epoch: minibatch 2 of 2: sample 13 of eval can't be read: OSError: disk is",
    ),
    (
        ["dataset.metrics={right: {target: 'OWN:num_right', best: max}}"],
        "dataset.metrics.right: right of 10 samples is the sum of each one's, needed is their mean",
    ),
    (["train.target={metric: wrong, value: 1}"], "train.target.metric: got 'wrong', allowed are top1, right"),
    (
        [*_OPTIMIZER, "train.optimizer.amsgrd=true"],
        "train.optimizer.amsgrd: unknown option, .*did you mean 'amsgrad'? (torc",
    ),
    ([*_OPTIMIZER[:1], "train.optimizer.target=torch.optim:LBFGS"], "LBFGS can't take a step of a stage: TypeError: "),
    (
        ["train.optimizer.name=muon"],
        "train.optimizer.name: muon can't make the optimizer: ValueError: Muon only supports 2D",
    ),
    (
        ["train.optimizer.name=rmsprop", "train.optimizer.alpha=-1"],
        "train.optimizer.name: rmsprop can't make the optimizer: ValueError: Invalid alpha value: -1",
    ),
    (
        [
            "train.schedule={name: one_cycle_lr, max_lr: 1.0, total_steps: 3, cycle_momentum: false}",
            "train.schedule.step_every={minibatches: 2}",
        ],
        "train.schedule.name: one_cycle_lr fails at step 4: ValueError: Tried to step 4 times",
    ),
    (
        [*_SCHEDULE, "train.schedule.target=OWN:negative"],
        "OWN:negative gives -0.01 at 0.51 of training, needed is a factor of",
    ),
    (
        [*_SCHEDULE, "train.schedule.target=torch.optim.lr_scheduler:StepLR", "train.schedule.step_size=3"],
        "train.schedule.target: torch.optim.lr_scheduler:StepLR counts steps, of which every stage makes",
    ),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the recipe in a folder of its own, beside its code."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"{OWN}.py").write_text(CODE)
    (tmp_path / "mine" / "cut_short.py").write_text("def f(:\n")
    (tmp_path / "mine" / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, OWN, raising=False)  # of another test's folder
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["run", "r.yaml", *words])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_refused_in_one_sentence(overrides: Sequence[str], message: str) -> None:
    result = run(*(override.replace("OWN", OWN) for override in overrides))
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("pipebench: error: ")
    before, _, after = message.replace("OWN", OWN).partition(".*")
    assert before in line
    assert after in line


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "overrides",
    [
        ["dataset.loss=torch.nn.functional:cross_entropy"],
        ["dataset.loss={target: 'torch.nn.functional:cross_entropy', label_smoothing: 0.1}"],
        [*_OPTIMIZER, "train.optimizer.amsgrad=true", "train.optimizer.weight_decay=0.1"],
        ["train.optimizer.name=adamw", *_SCHEDULE, f"train.schedule.target={OWN}:falling", "train.schedule.power=2"],
        [
            "train.optimizer.name=lars",
            "train.optimizer.lr_scaling=sqrt",
            "train.schedule={name: StepLR, step_size: 1, step_every: {minibatches: 3}}",
        ],
        ["train.optimizer={name: asgd, t0: 2}", "parallelism={mode: pipedream, plan: 2-1}"],
        ["train.optimizer.name=lamb", "engine.kind=simulated"],
        ["dataset.metrics=[top1, top5]", "dataset.loader_processes=2", "parallelism={mode: pipedream, plan: 2-1}"],
        ["engine.kind=simulated"],
        ["cluster.name=local", "parallelism.mode=single"],
    ],
)
def test_taken(overrides: Sequence[str]) -> None:
    result = run(*overrides)
    assert result.exit_code == 0, result.stderr


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", ["plan", "draw", "profile"])
def test_other_commands_refuse_alike(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "r.yaml", "model.width=-1"])
    assert result.exit_code == 2
    (line,) = without_phases(result.stderr).splitlines()
    assert line.endswith(f"ValueError: width is -1 ({OWN}.py:16, in __init__)")
    verbose = CliRunner().invoke(cli, [command, "r.yaml", "model.width=-1", "--verbose"])
    assert without_phases(verbose.stderr).splitlines()[0] == line
    assert 'raise ValueError(f"width is {width}")' in verbose.stderr
    assert CliRunner().invoke(cli, [command, "r.yaml"]).exit_code == 0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("verbose", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_worker_processes_tell_once(capfd: pytest.CaptureFixture[str], verbose: bool) -> None:
    """What only fails in a worker: exit code 2, one sentence, no restart; the traceback on request."""
    words = [
        *("model.fails=late", "engine.kind=distributed", "engine.device=cpu"),
        *("parallelism.mode=pipedream", "parallelism.plan=1-1"),
    ]
    result = run(*words, *(["--verbose"] if verbose else []))
    assert result.exit_code == 2
    said = result.stderr + capfd.readouterr().err
    if verbose:
        assert "Traceback" in said
        assert "restart" not in said
        return
    phases = [each for each in said.splitlines() if each.startswith("stranger  ")]  # that took long, on a busy machine
    (line,) = [each for each in said.splitlines() if each not in phases]
    assert "stranger: training, epoch 1, minibatch" in line
    assert "tired" in line
    assert f"{OWN}.py:" in line


def test_modules_are_found_beside_the_recipe_and_in_the_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    preflight(load("mine/r.yaml"))
    monkeypatch.delitem(sys.modules, OWN)
    (here / "base.yaml").write_text("extends: mine/r.yaml\nname: other\n")
    preflight(load("base.yaml"))
    monkeypatch.delitem(sys.modules, OWN)
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(here / "mine")
    preflight(load("../elsewhere/r.yaml"))


def test_two_modules_of_one_name_are_not_mixed_up(here: Path) -> None:
    (here / "other").mkdir()
    (here / "other" / f"{OWN}.py").write_text(CODE)
    (here / "other" / "r.yaml").write_text(RECIPE.replace("stranger\n", "other\n"))
    result = run("../other/r.yaml")
    assert result.exit_code == 2
    assert f"has the name of another module in use, {here}/mine/{OWN}.py: rename one of them" in result.stderr


def test_a_module_beside_the_recipe_comes_before_one_in_the_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / f"{OWN}.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(here / "elsewhere")
    monkeypatch.delitem(sys.modules, OWN, raising=False)
    loaded = load("../mine/r.yaml")
    preflight(loaded)
    assert type(initial_model(loaded.recipe)).__name__ == "Net"


def test_a_module_finds_its_neighbours_before_what_is_installed(here: Path) -> None:
    (here / "mine" / "omegaconf_of_mine.py").write_text("import colorsys_of_mine\nvalue = colorsys_of_mine.value\n")
    (here / "mine" / "colorsys_of_mine.py").write_text("def value():\n    return 7\n")
    assert import_target("omegaconf_of_mine:value")() == 7


@pytest.mark.usefixtures("here")
def test_a_model_is_the_same_in_every_process_whatever_it_draws_from() -> None:
    loaded = load("r.yaml")
    preflight(loaded)
    first, second = (initial_model(loaded.recipe).state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.usefixtures("here")
def test_the_line_of_the_user_s_own_code_is_named_and_ours_is_not() -> None:
    from pipebench.recipe.users_code import as_users, message_of
    from tests.support import raise_as_ours

    def caught(function: Callable[[], Any]) -> BaseException:
        try:
            function()
        except BaseException as error:
            return error
        raise AssertionError

    theirs = caught(lambda: torch.ones(2) @ torch.ones(3))
    assert isinstance(as_users(theirs), UserCodeError)
    assert "test_own_code.py:" in message_of(theirs)
    assert as_users(caught(lambda: raise_as_ours(ValueError("ours")))) is None
    assert as_users(caught(lambda: raise_as_ours(KeyboardInterrupt()))) is None
    assert as_users(UserCodeError("told already")) is None


def test_the_example_runs_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other modes are trained for the page of its report."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["run", str(EXAMPLE / "own-pipedream.yaml")])
    assert result.exit_code == 0, result.stderr
    assert "own-pipedream: reached certainty 0.9" in result.stdout


@pytest.mark.slow
def test_the_example_in_processes_and_resumed_has_the_virtual_engine_s_weights(tmp_path: Path) -> None:
    words = [
        *(str(EXAMPLE / "own-pipedream.yaml"), "parallelism.plan=1-1", "dataset.num_train=200", "train.target=null"),
        *("train.checkpoint_every={epochs: 1}", "engine.device=cpu", "dataset.num_eval=50"),
    ]
    found = {}
    for kind, epochs in (("virtual", 2), ("distributed", 1)):
        folder = tmp_path / kind
        folder.mkdir()
        done = pipebench("run", *words, f"engine.kind={kind}", f"train.max_epochs={epochs}", folder=folder)
        assert done.returncode == 0, done.stderr
        (run_folder,) = (folder / "pipebench-runs").iterdir()
        if epochs < 2:
            resumed = pipebench("run", "--resume", run_folder.name, "train.max_epochs=2", folder=folder)
            assert resumed.returncode == 0, resumed.stderr
        exported = pipebench("export", run_folder.name, "--out", "weights.pt", folder=folder)
        assert exported.returncode == 0, exported.stderr
        found[kind] = torch.load(folder / "weights.pt", weights_only=True)
    assert found["virtual"].keys() == found["distributed"].keys()
    assert all(torch.equal(tensor, found["distributed"][name]) for name, tensor in found["virtual"].items())


def pipebench(*words: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pipebench", *words], capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600,
    )  # fmt: skip


def test_code_is_found_while_another_thread_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python goes over its finders unguarded; a run's import of MLflow added one meanwhile, and the command failed."""

    class Disturbed(dict[str, Any]):
        left = 2

        def items(self) -> Any:
            Disturbed.left -= 1
            if Disturbed.left >= 0:
                raise RuntimeError("dictionary changed size during iteration")
            return super().items()

    monkeypatch.setattr(sys, "path_importer_cache", Disturbed(sys.path_importer_cache))
    (tmp_path / "found_meanwhile.py").write_text("def made():\n    return 1\n")
    assert import_target("found_meanwhile:made", [tmp_path])() == 1
    assert Disturbed.left < 0
