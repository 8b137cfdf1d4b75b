"""The process that starts a run uses no GPU: another one measures and plans, and its errors are reported alike."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.errors import PlanError, ProfileError, RecipeError, UserCodeError, WorkersFailedError
from pipebench.extensions.moves.planned import BEFOREHAND
from pipebench.extensions.moves.recipe import recipe_moves, to_text
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.run import deciding, processes
from pipebench.run.deciding import decided_apart, decision_of, prepare_job
from pipebench.run.request import RunRequest
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.simulate.meter import CUT_ANEW
from pipebench.train.job import Decision, Job
from pipebench.train.metrics import recipe_notes
from pipebench.train.prepare import prepare
from tests.recipes import uniform_recipe

ENDING = """\
name: ending
model: {target: "ending:HOW"}
dataset: {name: mnist5k}
train: {minibatch_size: 4, optimizer: {lr: 1}, max_epochs: 1}
cluster: {name: cluster-a}
parallelism: {mode: single}
"""
MODEL = """\
import os, signal

def exits():
    os._exit(7)

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def raises():
    raise RuntimeError("a mistake inside")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # syspath_prepend fails while a thread imports
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "ending.py").write_text(MODEL)
    (tmp_path / "small.yaml").write_text(
        uniform_recipe(4, 4000, 250, minibatch_size=250, parallelism="mode: pipedream, plan: 1-1")
    )
    return tmp_path


def decide(*words: str) -> tuple[Decision, list[str]]:
    loaded = load("small.yaml", words)
    cluster = load_cluster(loaded.recipe.cluster.name, loaded.recipe.cluster.servers)
    reported: list[str] = []
    return decided_apart(loaded.recipe, cluster, reported.append), reported


class Question(io.BytesIO):
    """The standard input of a process; `asked` gets what was written when it is closed."""

    def __init__(self, asked: Callable[[bytes], None]) -> None:
        super().__init__()
        self.asked = asked

    def __exit__(self, *exception: object) -> None:
        self.asked(self.getvalue())


class InThisProcess:
    """Stands in for the deciding process: does its work in this process, without the seconds of a start."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], **_: object) -> None:
        self.words, self.answers = command[-2:], os.dup(*pass_fds)  # the parent closes its own
        self.stdin = Question(self.decide)

    def decide(self, question: bytes) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(question)))
            patch.setattr(deciding, "end_with", lambda parent: None)
            deciding.main([self.words[0], str(self.answers)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    kill = wait = __exit__


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", InThisProcess)


def forbid(*_: object) -> None:
    raise AssertionError("this process touches CUDA")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process, and no other, see a GPU, and fail as soon as it touches it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", forbid)
    monkeypatch.setattr(torch.cuda, "empty_cache", forbid)
    monkeypatch.setattr(torch.cuda, "synchronize", forbid)


@pytest.mark.slow
@pytest.mark.usefixtures("project", "gpu")
def test_starting_a_run_in_processes_uses_no_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    """From the command line to the record, with real processes; they see no GPU, so they measure the processor."""
    words = ["run", "small.yaml", "engine.kind=distributed", "cluster.name=local"]
    result = CliRunner().invoke(cli, words)
    sentence = capfd.readouterr()
    assert result.exit_code == 0, result.output + sentence.err
    assert "trained 1 epoch" in sentence.out
    assert "prediction" in sentence.out


@pytest.mark.usefixtures("project", "gpu")
def test_a_comparison_decides_once_for_every_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, started = [], []
    decided = prepare_here()

    def apart(recipe: Any, *_: object) -> Decision:
        asked.append(recipe.name)
        return decided

    def launch(request: RunRequest, job: Job, *_: object) -> Any:
        started.append((request.name, job.recipe.train.seed, job.profile == decided.profile))
        raise WorkersFailedError(3)

    monkeypatch.setattr(deciding, "decided_apart", apart)
    monkeypatch.setattr(processes, "_launch", launch)
    words = ["small.yaml", "engine.kind=distributed", "cluster.name=local"]
    CliRunner().invoke(cli, ["run", *words, "--seeds", "1,2"])
    assert asked == ["small"]
    assert started == [("small-seed1", 1, True), ("small-seed2", 2, True)]


def prepare_here(*words: str) -> Decision:
    loaded = load("small.yaml", words)
    cluster = load_cluster(loaded.recipe.cluster.name, loaded.recipe.cluster.servers)
    return decision_of(prepare(loaded.recipe, cluster, trains=False))


@pytest.mark.usefixtures("project")
def test_decisions_equal_those_of_this_process() -> None:
    measured, reported = decide("cluster.name=local")
    assert reported[0].startswith("measuring layer 1 of ")
    assert prepare_here("cluster.name=local")[:2] == measured[:2], "it is in the cache"


@pytest.mark.usefixtures("project", "in_this_process")
@pytest.mark.parametrize(
    ("words", "kind"),
    [(["parallelism.cuts=[nowhere]"], PlanError), (["engine.timing=none.json"], ProfileError)],
    ids=["plan", "profile"],
)
def test_an_error_comes_back_as_the_same_sentence(words: list[str], kind: type[Exception]) -> None:
    with pytest.raises(kind) as expected:
        prepare_here(*words)
    with pytest.raises(kind) as found:
        decide(*words)
    assert str(found.value) == str(expected.value)
    assert type(found.value) is type(expected.value)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        pytest.param("exits", "ended with exit code 7", marks=pytest.mark.slow),
        ("killed", "was ended by SIGKILL; the system sends SIGKILL when memory runs out, unless somebody did"),
    ],
)
def test_an_end_without_an_answer_is_reported_once(
    how: str, sentence: str, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "ending.yaml").write_text(ENDING.replace("HOW", how))
    with pytest.raises(WorkersFailedError) as failed:
        decided_apart(load("ending.yaml", []).recipe, load_cluster("cluster-a", 1), lambda work: None)
    assert failed.value.exit_code == 3
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("pipebench:")] == [
        f"pipebench: error: the process that measures the profile {sentence}"
    ]


@pytest.mark.usefixtures("project", "in_this_process")
def test_errors_of_the_user_s_code_come_back_as_the_user_s(project: Path) -> None:
    (project / "ending.yaml").write_text(ENDING.replace("HOW", "raises"))
    with pytest.raises(UserCodeError, match=r"RuntimeError: a mistake inside \(.*ending.py:10, in raises\)"):
        decided_apart(load("ending.yaml", []).recipe, load_cluster("cluster-a", 1), lambda work: None)


@pytest.mark.usefixtures("project")
def test_ctrl_c_ends_the_process_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Spied(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            started.append((self, os.getpgid(self.pid)))

    def interrupt(work: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Spied)
    loaded = load("small.yaml", ["cluster.name=local"])
    with pytest.raises(KeyboardInterrupt):
        decided_apart(loaded.recipe, load_cluster("local", 1), interrupt)
    ((process, group),) = started
    assert process.returncode == -signal.SIGKILL
    assert group == process.pid, "the terminal's Ctrl-C isn't for it"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("project")
def test_deciding_leaves_no_memory_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_lazy_init", forbid)
    decided, _ = decide("cluster.name=local", "engine.device=cuda")
    assert decided.profile.source == "measured"


def test_a_move_after_the_end_is_refused_unless_a_longer_run_asked_for_it(tmp_path: Path) -> None:
    """0.2.0 dropped it without a message."""
    loaded = load("modes/pipedream-moved", ["train.max_epochs=1", "engine.kind=simulated"])
    reported = r"moves\[0\].at: got minibatch 187, and the run ends after 125 \(train.max_epochs 1\): .* 1 to 124$"
    with pytest.raises(RecipeError, match=rf"^recipes/modes/pipedream-moved.yaml:8: parallelism.vpipe.{reported}"):
        prepare_job(loaded, silent=True)
    job = prepare_job(replace(loaded, goes_on=True), silent=True)
    (move,) = recipe_moves(loaded.recipe)
    kept = tmp_path / "moves.json"
    kept.write_text(to_text([RepartitionRecord(187, move.cuts, None, move.cuts, BEFOREHAND, False, 5984, 1.0, 0.0)]))
    of_file = [f"parallelism.vpipe={{live: false, moves: {kept}}}", "train.max_epochs=1", "engine.kind=simulated"]
    for given in (job, prepare_job(load("modes/pipedream-straight", of_file), silent=True)):
        assert recipe_notes(given)[CUT_ANEW] == "not at minibatch 187, which the run ends before"
