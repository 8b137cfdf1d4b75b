"""Runs in processes from the command line to the record: killed, stopped, stalled and misused."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from pipebench.cli.main import cli
from reports.studies.watched_run import WatchedRun, recorded
from tests.commands import CopiedCommand, CopiedRun, weights
from tests.patience import PATIENCE_S, wait_for, without_phases
from tests.processes import reserved_port

SMALL = (
    "quickstart", "model.width=0.0625", "train.target=null", "train.max_epochs=1", "parallelism.plan=1-1",
    "train.evaluate_every={minibatches: 50}", "train.checkpoint_every={minibatches: 25}",
)  # fmt: skip
IN_PROCESSES = (*SMALL, "engine.kind=distributed")
# It ends only by a signal, however late that comes on a loaded machine.
ENDLESS = (*IN_PROCESSES, "cluster.name=local", "train.max_epochs=100000")
MINIBATCHES_PER_EPOCH = 125
CURVES = ("train_loss", "eval_loss", "top1")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class UnderTorchrun(WatchedRun):
    """The same under torchrun, whose restarts have no `PIPEBENCH_ATTEMPT`."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        launcher += ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        start = subprocess.Popen
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("subprocess.Popen", lambda command, **options: start([*launcher, *command[1:]], **options))
            super().__init__(folder, words)


def pipebench(folder: Path, *words: str) -> Result:
    """Call the command line in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(cli, words)


def result_of(run: WatchedRun) -> dict[str, Any]:
    assert run.run_folder is not None
    return json.loads((run.run_folder / "record" / "result.json").read_text())


def curves(record: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of the only run that MLflow has, with every point once."""
    assert len(record["runs"]) == 1
    found = {name: record["metrics"][f"curves/{name}"] for name in CURVES}
    for rows in found.values():
        assert len({step for step, _ in rows}) == len(rows)
    return found


@pytest.fixture(scope="module")
def virtual(_own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run in the virtual engine."""
    folder = tmp_path_factory.mktemp("virtual")
    assert pipebench(folder, "run", *SMALL).exit_code == 0
    return folder


def assert_same_weights(folder: Path, other: Path) -> None:
    expected, found = weights(other), weights(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_killed_worker_changes_nothing(virtual: Path, tmp_path: Path) -> None:
    """One worker of two is killed as soon as there is a checkpoint; weights and curves are the virtual engine's."""
    with CopiedRun(tmp_path, IN_PROCESSES) as run:
        assert run.wait_until(run.steps, PATIENCE_S, "a checkpoint")
        run.signal(signal.SIGKILL, [run.workers(0)[1]])
        assert run.wait(PATIENCE_S) == 0, run.output
        result = result_of(run)
    for said in ("rank 1 ended by SIGKILL; restart 1 of 3", "goes on from minibatch", "trained 1 epoch"):
        assert run.output.count(said) == 1, run.output
    assert "epoch 0.8" in run.output  # twice if the kill comes late, between it and its checkpoint
    assert "Traceback" not in run.output

    assert_same_weights(tmp_path, virtual)

    record = recorded(tmp_path)
    assert curves(record)["top1"] == curves(recorded(virtual))["top1"]
    assert [point["samples"] for point in result["points"]] == [step for step, _ in curves(record)["top1"]]
    (about,) = record["runs"]
    assert about["status"] == "FINISHED"
    wanted = {"engine": "distributed", "mode": "pipedream", "clock": "wall", "resumes": "1", "outcome": "completed"}
    assert about["tags"].items() >= wanted.items()
    assert {"checkpoint_time_s", "comm_bytes_per_sample"} <= result["metrics"].keys()
    parts_s = sum(result["metrics"][f"{name}_time_s"] for name in ("training", "evaluation", "checkpoint", "lost"))
    assert parts_s == pytest.approx(result["metrics"]["total_time_s"])
    assert "comm_bytes_per_sample" in record["metrics"]
    assert [worker["compute_s"] > 0 for worker in result["workers"]] == [True, True]
    # Costs of a V100 don't predict this machine's.
    assert not any("predict" in name for name in record["metrics"])


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_while_layers_move_ends_undisturbed(tmp_path: Path) -> None:
    """From the command line; `distributed/test_killed.py` kills at every step of a move.

    Every segment has a move right after it begins, and the kill comes right after a checkpoint.
    """
    moves = [{"at": {"minibatches": 25 * k + 8}, "cuts": [("features_10", "features_14")[k % 2]]} for k in range(5)]
    asked = json.dumps({"swap": False, "recompute": False, "moves": moves})
    words = (*SMALL, f"parallelism.vpipe={asked}", "train.evaluate_every={minibatches: 125}")
    (tmp_path / "virtual").mkdir()
    (tmp_path / "killed").mkdir()
    assert pipebench(tmp_path / "virtual", "run", *words).exit_code == 0
    with WatchedRun(tmp_path / "killed", (*words, "engine.kind=distributed")) as run:
        assert run.wait_until(run.steps, PATIENCE_S, "a checkpoint")
        run.signal(signal.SIGKILL, [run.workers(0)[0]])
        assert run.wait(PATIENCE_S) == 0, run.output
        result = result_of(run)
    assert run.output.count("goes on from minibatch") == 1, run.output
    assert "Traceback" not in run.output
    assert_same_weights(tmp_path / "killed", tmp_path / "virtual")
    assert result["metrics"]["repartitions"] == 5
    kept = [json.loads(path.read_text())["moves"] for path in tmp_path.glob("killed/**/moves.json")]
    assert [[(each["minibatch"], each["cuts"], each["live"]) for each in found] for found in kept[:1]] == [
        [(25 * k + 8, [("features_10", "features_14")[k % 2]], True) for k in range(5)]
    ]


def refused_as_running(folder: Path, run_id: str, pid: int) -> bool:
    """Return whether resuming a run is refused in one sentence, because a process trains it."""
    answer = pipebench(folder, "run", "--resume", run_id)
    said = f"pipebench: error: run {run_id} is running: process {pid} on {socket.gethostname()} trains it; wait until"
    return answer.exit_code == 2 and without_phases(answer.stderr).count("\n") == 1 and said in answer.stderr


@pytest.mark.parametrize("kind", ["virtual", pytest.param("distributed", marks=pytest.mark.slow)])
def test_a_run_that_is_running_is_exported_but_not_resumed(tmp_path: Path, kind: str) -> None:
    """0.1.0 let it be resumed: both trained, and removed each other's checkpoints."""
    with CopiedRun(tmp_path, (*SMALL, "train.max_epochs=100000", f"engine.kind={kind}")) as run:
        assert run.wait_until(run.steps, PATIENCE_S, "a checkpoint")
        assert run.run_folder is not None
        run_id = run.run_folder.name
        assert refused_as_running(tmp_path, run_id, run.process.pid)
        assert weights(tmp_path)
        run.signal(signal.SIGKILL, [run.process.pid])
    epochs = max(run.steps()) // MINIBATCHES_PER_EPOCH + 1
    answer = pipebench(tmp_path, "run", "--resume", run_id, f"train.max_epochs={epochs}")
    assert answer.exit_code == 0, answer.output


@pytest.mark.slow
def test_torchrun_restarts_in_the_same_run_folder(virtual: Path, tmp_path: Path) -> None:
    with UnderTorchrun(tmp_path, IN_PROCESSES) as run:
        assert run.wait_until(run.steps, PATIENCE_S, "a checkpoint")
        assert run.run_folder is not None
        assert refused_as_running(tmp_path, run.run_folder.name, run.workers()[0])
        run.signal(signal.SIGKILL, [run.workers()[1]])
        assert run.wait(PATIENCE_S) == 0, run.output
        assert not run.left_over()
        assert result_of(run)["outcome"] == "completed"
    assert len(list((tmp_path / "pipebench-runs").iterdir())) == 1
    assert len(re.findall(r"quickstart-\w{8} goes on from minibatch \d+", run.output)) == 1, run.output
    assert "pipebench: error" not in run.output
    assert_same_weights(tmp_path, virtual)

    record = recorded(tmp_path)
    assert curves(record)["top1"] == curves(recorded(virtual))["top1"]
    (about,) = record["runs"]
    assert (about["status"], about["tags"]["resumes"]) == ("FINISHED", "1")


@pytest.mark.slow
def test_ctrl_c_and_resuming_with_another_plan(tmp_path: Path) -> None:
    with WatchedRun(tmp_path, ENDLESS) as run:
        assert run.wait_until(run.steps, PATIENCE_S, "a checkpoint")
        run.signal(signal.SIGINT, [run.process.pid])
        assert run.wait(PATIENCE_S) == 130, run.output
        assert run.output.count("stopping at the next drain; Ctrl-C again ends now") == 1
        assert not run.left_over()
        result, step = result_of(run), max(run.steps())
        assert run.run_folder is not None
        run_id = run.run_folder.name
        assert run.output.count(f"pipebench: its checkpoints are kept: pipebench run --resume {run_id}\n") == 1
    assert result["outcome"] == "interrupted"
    assert result["sentence"] == f"interrupted after {step * 32:,} samples"
    # Where MLflow is slow, the prompt returns before the record is closed.
    wait_for(lambda: [each["status"] for each in recorded(tmp_path)["runs"]] == ["KILLED"], "the closed record")
    before = recorded(tmp_path)

    epochs = 2 * (step // (2 * MINIBATCHES_PER_EPOCH) + 1)  # even, and so with an evaluation at their end
    other = ("--resume", run_id, "parallelism.mode=dp", "parallelism.plan=2", f"train.max_epochs={epochs}")
    with WatchedRun(tmp_path, other) as run:
        assert run.wait(PATIENCE_S) == 0, run.output
    assert f"{run_id} goes on from minibatch {step}\n" in run.output
    assert result_of(run)["outcome"] == "completed"
    after = recorded(tmp_path)
    (about,) = after["runs"]
    assert (about["id"], about["status"]) == (before["runs"][0]["id"], "FINISHED")
    assert about["tags"].items() >= {"resumes": "1", "resumed.mode": "dp", "resumed.plan": "2"}.items()
    assert [samples for samples, _ in curves(after)["top1"]] == list(range(1600, 4000 * epochs + 1, 1600))
    # The profile was measured here, by both processes at the same time.
    assert "prediction_error" in after["metrics"]


@pytest.mark.slow
def test_a_suspended_worker_is_named(tmp_path: Path) -> None:
    with WatchedRun(tmp_path, (*IN_PROCESSES, "engine.stall_limit_s=15", "train.max_epochs=50")) as run:
        assert run.wait_until(run.steps, PATIENCE_S, "a checkpoint")
        run.signal(signal.SIGSTOP, [run.workers(0)[1]])
        assert run.wait(PATIENCE_S) == 3, run.output
        assert not run.left_over()
        assert run.run_folder is not None
        hint = f"pipebench: its checkpoints are kept: pipebench run --resume {run.run_folder.name}"
    errors = [line for line in run.output.splitlines() if "pipebench: error: rank" in line]
    assert len(errors) == 1, run.output
    assert "worker 1 (stage 1) has not been heard of for" in errors[0]
    assert "engine.stall_limit_s, is 15 s" in errors[0]
    assert run.output.count(hint) == 1
    assert "restart" not in run.output
    assert "Traceback" not in run.output
    assert recorded(tmp_path)["runs"][0]["status"] == "FAILED"


def test_too_few_processes_are_reported_once(tmp_path: Path) -> None:
    """As under torchrun: two processes for a plan of three workers."""
    others = [word for word in IN_PROCESSES if not word.startswith("parallelism.plan=")]
    codes, said = started_apart(tmp_path, 2, *([[*others, "parallelism.plan=1-1-1"]] * 2))
    assert codes == [2, 2], said
    assert said.count("\n") == 1, said
    assert said.startswith("pipebench: error: plan 1-1-1 needs 3 workers, got 2: start torchrun so that"), said


def test_a_mistake_of_all_processes_is_reported_once_and_one_of_another_too(tmp_path: Path) -> None:
    """Before they had joined each reported its own, as under `srun`."""
    wrong = [*IN_PROCESSES, "train.max_epochs=0"]
    codes, said = started_apart(tmp_path, 2, wrong, wrong, [*IN_PROCESSES, "train.seed=-1"])
    assert codes == [2, 2, 2], said
    lines = sorted(line for line in said.splitlines() if "pipebench: error: " in line)
    assert [line.partition(" got ")[0].rpartition("line: ")[2] for line in lines] == [
        "train.max_epochs:",
        "train.seed:",
    ]


def test_hosts_with_different_recipes_are_reported(tmp_path: Path) -> None:
    """Each host reads its own recipe; only what comes from the environment may differ, and where files are.

    One that doesn't suit rank 0's plan was reported by what the plan lacked, and on that host alone.
    """
    words = []
    for name, size in (("here", 32), ("there", 16)):
        cluster = tmp_path / name / "cluster.yaml"
        cluster.parent.mkdir()
        cluster.write_text("extends: cluster-a\n")
        words.append([*IN_PROCESSES, f"train.minibatch_size={size}", f"cluster.name={cluster}"])
    codes, said = started_apart(tmp_path, 1, *words)
    assert codes == [2, 2], said
    rank_1 = "pipebench: error: rank 1 on "
    (line, *others) = [line for line in said.splitlines() if line.startswith(rank_1)]
    assert "does: recipe key train.minibatch_size: 16 there, 32 here; give every host" in line
    assert others in ([], [line]), said  # each host reports to its own users
    assert "Traceback" not in said


def test_a_worker_without_our_launcher_reports_a_lost_peer(tmp_path: Path) -> None:
    """As under srun: no other process noticed the kill."""
    words = [*IN_PROCESSES, "train.max_epochs=100000"]  # it measures nothing, unlike ENDLESS
    with starting_apart(tmp_path, 2, words, words) as (first, second):
        wait_for(lambda: any(tmp_path.glob("pipebench-runs/*/checkpoints/*")), "a checkpoint")
        second.kill()
        code, said = first.wait(), said_by(tmp_path, 0)
        assert code == 3, said
    (line,) = [line for line in said.splitlines() if "error" in line]
    assert line.startswith("pipebench: error: rank 0: lost a peer: "), said


def started_apart(folder: Path, num_per_host: int, *words: Sequence[str]) -> tuple[list[int], str]:
    """Run `starting_apart` to the end; return exit codes and all output."""
    with starting_apart(folder, num_per_host, *words) as processes:
        codes = [process.wait() for process in processes]
    return codes, without_phases("".join(said_by(folder, rank) for rank in range(len(words))))


def said_by(folder: Path, rank: int) -> str:
    """Return the output of a process that was started apart, both streams."""
    return (folder / f"said-{rank}.txt").read_text()


@contextlib.contextmanager
def starting_apart(folder: Path, num_per_host: int, *words: Sequence[str]) -> Iterator[list[CopiedCommand]]:
    """Start a process of a run per list of words, as `srun` does: no launcher restarts them or reports their end."""
    with reserved_port() as reserved, contextlib.ExitStack() as stack:
        place = {"WORLD_SIZE": str(len(words)), "LOCAL_WORLD_SIZE": str(num_per_host), "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = str(reserved.getsockname()[1])
        processes = []
        for rank, own in enumerate(words):
            settings = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank % num_per_host)}
            out = folder / f"said-{rank}.txt"
            processes.append(stack.enter_context(CopiedCommand(["run", *own], folder, out, out, settings)))
        yield processes


def test_a_missing_run_is_a_user_s_mistake(tmp_path: Path) -> None:
    answer = pipebench(tmp_path, "run", "--resume", "nosuch")
    assert answer.exit_code == 2
    assert answer.stderr.splitlines() == [
        "pipebench: error: run: got 'nosuch', but pipebench-runs/ in the working directory holds no run"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_a_user_s_mistake(tmp_path: Path) -> None:
    answer = pipebench(tmp_path, "run", *IN_PROCESSES, "engine.device=cuda")
    assert answer.exit_code == 2
    (line,) = answer.stderr.splitlines()
    assert line.startswith("pipebench: error: ")
    assert "engine.device: got cuda" in line
    assert not (tmp_path / "pipebench-runs").exists()
