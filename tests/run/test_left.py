"""A command of several runs that ends early prints how to make the remaining ones."""

import errno
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from torch import nn

from pipebench.cli.main import cli
from pipebench.distributed import launch
from pipebench.errors import UserError, WorkersFailedError
from pipebench.recipe.load import load, load_each
from pipebench.run import drawings, processes, runner
from pipebench.run.one_process import run_simulated
from pipebench.run.request import RunRequest
from pipebench.run.suite import Suite, left
from pipebench.show import console
from pipebench.show.answers import Run
from pipebench.tracking import mlperf
from pipebench.tracking.run_log import Tracking
from tests.commands import run_copy
from tests.shortcuts import evaluate_few_digits


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    evaluate_few_digits(monkeypatch, 64)


def test_ctrl_c_between_the_runs_of_a_comparison_prints_how_to_make_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = console.print_position

    def interrupted(number: int, total: int, name: str, to: Console) -> None:
        if number == 2:
            raise KeyboardInterrupt
        begin(number, total, name, to)

    monkeypatch.setattr(console, "print_position", interrupted)
    words = ["quickstart/dp", "quickstart/gpipe", "quickstart/model", "engine.kind=simulated"]
    done = CliRunner().invoke(cli, ["run", *words])
    assert done.exit_code == 130
    (said,) = [line for line in done.stderr.splitlines() if "runs done" in line]
    assert said.startswith("pipebench: 1 of 3 runs done; the others: pipebench run /")
    assert said.endswith("/quickstart/model.yaml engine.kind=simulated")
    rest = said.partition("others: pipebench ")[2].split()
    assert [Path(word).stem for word in rest[1:3]] == ["gpipe", "model"]
    monkeypatch.setattr(console, "print_position", begin)
    assert "2 of 2  quickstart-model" in CliRunner().invoke(cli, rest).output


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [["train.seed=0,1"], ["--seeds", "0,1"]], ids=" ".join)
def test_a_run_whose_pictures_are_interrupted_is_done(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result was recorded, and the command for the others made the run again."""
    monkeypatch.setattr(drawings, "record_run", interrupted)
    done = CliRunner().invoke(cli, ["run", "quickstart/dp", "engine.kind=simulated", *options])
    assert done.exit_code == 130
    (said,) = [line for line in done.stderr.splitlines() if "runs done" in line]
    assert said.startswith("pipebench: 1 of 2 runs done; the others: pipebench run /")
    assert said.split()[-1] in ("train.seed=1,", "1")


@pytest.mark.parametrize("place", ["pictures", "MLPerf's log"])
def test_an_interrupted_trained_run_is_done_and_removes_temporary_checkpoints(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command printed how to resume a finished run, and didn't count it while its log for MLPerf was written."""
    monkeypatch.setattr(*(drawings, "record_run") if place == "pictures" else (mlperf, "mlperf_log"), interrupted)
    train = ["train.max_epochs=1", "train.checkpoint_every.epochs=1", "train.checkpoint_keep=0", "train.seed=0,1"]
    done = CliRunner().invoke(cli, ["run", "quickstart/dp", "dataset.num_train=256", *train])
    assert done.exit_code == 130
    (said,) = [line for line in done.stderr.splitlines() if "runs done" in line]
    assert said.startswith("pipebench: 1 of 2 runs done; the others: pipebench run /")
    assert "--resume" not in done.output
    assert not [*Path("pipebench-runs").glob("*/checkpoints/step-*")]


IN_PROCESSES = (
    *("quickstart/dp", "dataset.num_train=256", "cluster.count=2", "train.max_epochs=1"),
    *("engine.kind=distributed", "engine.timing=analytic"),
)


def interrupt_the_end() -> None:
    vars(processes)["end_record"] = interrupted


def test_a_run_in_processes_interrupted_while_its_end_is_sent_is_done(tmp_path: Path) -> None:
    done = run_copy(["run", *IN_PROCESSES, "train.seed=0,1"], tmp_path, change=interrupt_the_end)
    assert done.returncode == 130
    assert [line for line in done.stderr.splitlines() if "1 of 2 runs done" in line]


def kill_at_the_end() -> None:
    """Cut a run's record off after its result, as if a second Ctrl-C had ended rank 0 while it drew."""

    def killed_at_its_end(*given: Any, **options: Any) -> int:
        assert launch.run_workers(*given, **options) == 0
        (record,) = Path("pipebench-runs").glob("*/record/record.jsonl")
        lines = record.read_text().splitlines(keepends=True)
        (end,) = [index for index, line in enumerate(lines) if '"result"' in line]
        record.write_text("".join(lines[: end + 1]))
        return launch.INTERRUPTED

    vars(processes)["run_workers"] = killed_at_its_end


def test_a_run_in_processes_is_done_that_is_interrupted_while_rank_0_draws(tmp_path: Path) -> None:
    """A second Ctrl-C ends the workers, whatever they do."""
    words = [*IN_PROCESSES, "train.checkpoint_keep=0", "train.seed=0,1"]
    done = run_copy(["run", *words], tmp_path, change=kill_at_the_end)
    assert done.returncode == 130
    assert [line for line in done.stderr.splitlines() if "1 of 2 runs done" in line], done
    assert "--resume" not in done.stdout + done.stderr
    assert not [*Path("pipebench-runs").glob("*/checkpoints/step-*")]


def test_an_interrupted_start_is_not_done_though_the_run_that_it_goes_on_with_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_copy(["run", *IN_PROCESSES, "train.checkpoint_keep=1"], tmp_path)
    monkeypatch.setattr(processes, "run_workers", lambda *_, **__: launch.INTERRUPTED)
    (folder,) = Path("pipebench-runs").iterdir()
    done = CliRunner().invoke(cli, ["run", "--resume", folder.name, "train.max_epochs=2"])
    assert done.exit_code == 130
    assert f"its checkpoints are kept: pipebench run --resume {folder.name} train.max_epochs=2" in done.stderr


@pytest.mark.parametrize("options", [[], ["--json"], ["--json-lines"], ["--seeds", "3,4"]], ids=" ".join)
def test_a_run_of_a_sweep_that_fails_does_not_end_the_others(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did, and nothing was printed of those done before."""
    models = weakref.WeakSet[nn.Module]()

    def run(request: RunRequest, tracking: Tracking) -> Run:
        assert not models, "what a failed run held is free"
        if "minibatch_size=16" in request.name:
            model = nn.Linear(2, 2)
            models.add(model)
            raise UserError(f"{request.name}: net.py:7, in forward: ValueError: no such size")
        return run_simulated(request, tracking)

    monkeypatch.setitem(runner.RUNS, "simulated", run)
    given = ["quickstart/dp", "engine.kind=simulated", "train.minibatch_size=8,16,32", *options]
    done = CliRunner().invoke(cli, ["run", *given])
    assert done.exit_code == 2, done.output
    names = [f"minibatch_size=16-seed{seed}" for seed in (3, 4)] if "--seeds" in options else ["minibatch_size=16"]
    said = [line for line in done.stderr.splitlines() if "minibatch_size=16" in line and not line.startswith("2 of 3")]
    for name, line in zip(names, said, strict=False):
        reason = "net.py:7, in forward: ValueError: no such size"
        assert line == f"pipebench: quickstart-dp-{name} has failed: {reason}"
    number = "4 of 6" if "--seeds" in options else "2 of 3"
    assert said[-2].startswith(f"pipebench: {number} runs done; the others: pipebench run /")
    assert said[-2].endswith("train.minibatch_size=16," + (" --seeds 3,4" if "--seeds" in options else ""))
    assert said[-1] == f"pipebench: error: quickstart-dp-{names[0]}: net.py:7, in forward: ValueError: no such size"
    assert len(said) == len(names) + 2
    if "--json" in options:
        assert [each["train.minibatch_size"] for each in json.loads(done.stdout)["rows"]] == ["8", "32"]
    elif "--json-lines" in options:
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert [each["event"] for each in lines[-3:]] == ["result", "result", "comparison"]
    else:
        rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(" minibatch_size=")]
        assert rows[:2] == ["minibatch_size=8", "minibatch_size=32"]


@pytest.mark.parametrize(
    ("error", "code"), [(WorkersFailedError(130), 130), (KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "full"), 2)]
)
def test_what_is_done_is_printed_if_the_others_do_not_go_on(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: RunRequest, tracking: Tracking) -> Run:
        if request.name.endswith("seed=1"):
            raise error
        return run_simulated(request, tracking)

    monkeypatch.setitem(runner.RUNS, "simulated", run)
    words = ["run", "quickstart/dp", "engine.kind=simulated", "train.seed=0,1,2", "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == code
    assert [each["seed"] for each in json.loads(done.stdout)["runs"]] == [0]
    assert "train.seed=1,2\n" in done.stderr


def test_the_remaining_seeds_and_recipes_of_a_list() -> None:
    one, two = load("quickstart/dp"), load("quickstart/gpipe")
    suite = Suite("suite", ("train.max_epochs=2",))
    recipes = [str(one.path), str(two.path)]
    of_first, of_both = recipes[0], " ".join(recipes)
    names = [one.run_name, two.run_name]
    assert left([one, two], suite, None, ()) == [f"pipebench run {of_both} train.max_epochs=2"]
    assert left([one, two], suite, [3, 4], [(names[0], 3)]) == [
        f"pipebench run {of_first} train.max_epochs=2 --seeds 4",
        f"pipebench run {recipes[1]} train.max_epochs=2 --seeds 3,4",
    ]


def test_the_command_for_the_rest_of_a_sweep_has_every_key_once() -> None:
    """A list of one element ends with a comma: its run has the same name as in the sweep."""
    path = load("quickstart/dp").path
    given = ("train.minibatch_size=16,32", "train.max_epochs=2", "train.seed=0,1,2")
    sweep, suite = load_each(path, given), Suite("suite", given)
    ids = [(each.run_name, each.recipe.train.seed) for each in sweep]
    both = f"pipebench run {path} train.max_epochs=2 train.minibatch_size"
    assert left(sweep, suite, None, ids[:1]) == [f"{both}=16, train.seed=1,2", f"{both}=32, train.seed=0,1,2"]
    assert left(sweep, suite, None, ids[:5]) == [f"{both}=32, train.seed=2,"]
    assert left(sweep, suite, None, [*ids[:1], *ids[3:]]) == [f"{both}=16, train.seed=1,2"]
    words = left(sweep, suite, None, ids[:5])[0].split()[3:]
    assert [each.run_name for each in load_each(path, words)] == [sweep[5].run_name]
    others = RunRequest(sweep[5], sweep[5].run_name, suite).words
    assert others == (str(path), "train.max_epochs=2", "train.minibatch_size=32,", "train.seed=2,"), "of its processes"
