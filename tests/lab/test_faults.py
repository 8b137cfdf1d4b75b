"""Hosts that vanish and wires that stall or slow down during a run: the messages, their times, and the remaining files.

Real processes across real sockets: they need root, and minutes. `nox -s lab` runs them.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from click.testing import CliRunner

from pipebench.cli.main import cli
from tests.commands import weights
from tests.lab import launcher
from tests.lab.findings import Options
from tests.lab.hosts import Lab
from tests.lab.machine import needs_a_lab
from tests.lab.trials import cluster_words
from tests.patience import PATIENCE_S, wait_for

pytestmark = [needs_a_lab, pytest.mark.lab]

BANDWIDTH = 1.25e7
SILENCE_S = 10
TRAINING = (
    # Weights depend on the cut: without one, that of cluster-a's times would not be that of this machine's.
    "model.width=0.0625", "train.target=null", "train.max_epochs=2", "parallelism.plan=1-1",
    "parallelism.cuts=[features_17]",
    "train.evaluate_every={minibatches: 125}", "train.checkpoint_every={minibatches: 25}",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the run in the virtual engine."""
    folder = tmp_path_factory.mktemp("virtual")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner().invoke(cli, ["run", "quickstart", *TRAINING])
        assert result.exit_code == 0, result.output
        return weights(folder)


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads(next(folder.glob("pipebench-runs/*/record/result.json")).read_text())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("pipebench-runs/*/checkpoints/*/manifest.json"))


class Training:
    """A run across the hosts of a lab, in a new folder; leaving the context manager ends its processes."""

    def __init__(self, lab: Lab, folder: Path, words: Sequence[str]) -> None:
        self.folder = folder
        self.logs = [folder / f"host{index}.log" for index in range(lab.num_hosts)]
        with ExitStack() as files:
            logs = [files.enter_context(path.open("w")) for path in self.logs]
            self.agents = launcher.start(lab, 1, ["pipebench", "run", *words], logs, cwd=folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()

    def said(self, host: int) -> str:
        return self.logs[host].read_text(errors="replace")

    def wait_for_checkpoint(self) -> None:
        def has_checkpoint() -> bool:
            assert None in [agent.poll() for agent in self.agents], self.said(0)
            return bool(checkpoints(self.folder))

        wait_for(has_checkpoint, "a checkpoint")

    def wait_for_sentence(self, host: int) -> None:
        """Wait until a host's worker has printed why it ends; torchrun, without the store, ends when TCP gives up."""
        wait_for(lambda: bool(report(self.said(host))), "a sentence")

    def wait(self, host: int) -> int:
        """Wait until a host's processes have ended; return torchrun's exit code."""
        try:
            return self.agents[host].wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"host {host} hangs:\n{self.said(host)}") from None


def onto(folder: Path) -> list[str]:
    options = Options(2, 1, (BANDWIDTH,), False, folder)
    return [*cluster_words(options, BANDWIDTH, 5e-6), f"engine.silence_limit_s={SILENCE_S}"]


@contextmanager
def training(folder: Path, *words: str) -> Iterator[tuple[Lab, Training]]:
    """A run across two hosts that has a checkpoint."""
    with Lab(2) as lab:
        lab.limit(BANDWIDTH)
        with Training(lab, folder, ["quickstart", *TRAINING, *onto(folder), *words]) as run:
            run.wait_for_checkpoint()
            yield lab, run


def resumed(folder: Path) -> dict[str, torch.Tensor]:
    """Resume the only run of a folder, in a new lab, to its end; return its weights."""
    (run,) = folder.glob("pipebench-runs/*")
    with Lab(2) as lab:
        lab.limit(BANDWIDTH)
        with Training(lab, folder, ["--resume", run.name]) as going_on:
            assert [going_on.wait(host) for host in range(2)] == [0, 0], going_on.said(0)
        assert f"{run.name} goes on from minibatch " in going_on.said(0)
    return weights(folder)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def retransmitted(pid: int) -> int:
    """Return the number of segments that a process's host has retransmitted."""
    names, values = (line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if "Tcp:" in line)
    return int(values[names.index("RetransSegs")])


def worker_of(agent: "subprocess.Popen[str]") -> int:
    """Return the process that a host's torchrun has started."""
    children = [pid for file in Path(f"/proc/{agent.pid}/task").glob("*/children") for pid in file.read_text().split()]
    (worker,) = (pid for pid in children if b"pipebench" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(worker)


def report(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("pipebench: error: ")]


def test_a_host_that_vanishes_is_named_and_the_run_can_be_resumed(
    undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with training(tmp_path) as (lab, run):
        lab.destroy(1)
        assert run.wait(0) == 1
    (sentence,) = report(run.said(0))
    assert sentence == (
        f"pipebench: error: rank 1 on host1 has not been heard of for {SILENCE_S} s (engine.silence_limit_s): "
        "the host, its network or the process hangs or is gone"
    )
    assert_same(resumed(tmp_path), undisturbed)


def test_the_store_s_host_that_vanishes_is_named_by_its_address(
    undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with training(tmp_path) as (lab, run):
        lab.destroy(0)
        run.wait_for_sentence(1)
    (sentence,) = report(run.said(1))
    assert re.search(
        r"store at 10\.77\.0\.101:\d+, by which all hosts find each other, has not answered for 10 s", sentence
    )
    assert_same(resumed(tmp_path), undisturbed)


def test_a_wire_that_stalls_permanently_ends_the_run_on_both_sides(tmp_path: Path) -> None:
    with training(tmp_path) as (lab, run):
        lab.unplug(0)
        assert run.wait(0) == 1
        run.wait_for_sentence(1)
    assert len(report(run.said(0))) == 1
    assert "rank 1 on host1 has not been heard of for 10 s" in report(run.said(0))[0]
    assert "the store at 10.77.0.101:" in report(run.said(1))[0]


def test_a_short_stall_of_a_wire_changes_nothing(undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with training(tmp_path, f"engine.silence_limit_s={PATIENCE_S}") as (lab, run):
        lab.unplug(1)
        before = retransmitted(run.agents[0].pid)
        wait_for(lambda: retransmitted(run.agents[0].pid) > before + 3, "TCP to try again, in vain")
        lab.plug(1)
        assert [run.wait(host) for host in range(2)] == [0, 0], run.said(0)
    assert_same(weights(tmp_path), undisturbed)


def test_a_host_whose_processes_are_killed_is_reported_at_once(tmp_path: Path) -> None:
    """Its kernel closes the connections, which its peers notice long before the limit of silence."""
    with training(tmp_path, f"engine.silence_limit_s={PATIENCE_S}") as (lab, run):
        lab.kill(1)
        assert run.wait(0) == 1
    assert any("rank 1 on host1 is gone: lost a peer" in line for line in report(run.said(0))), run.said(0)


def test_both_hosts_restart_when_a_worker_of_one_is_killed(
    undisturbed: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")  # torchrun's --max-restarts
    with training(tmp_path) as (_, run):
        os.kill(worker_of(run.agents[1]), signal.SIGKILL)
        assert [run.wait(host) for host in range(2)] == [0, 0], run.said(0)
    assert len(re.findall(r"quickstart-\w{8} goes on from minibatch \d+", run.said(0))) == 1, run.said(0)
    assert_same(weights(tmp_path), undisturbed)


def test_a_wire_that_slows_down_is_seen_in_the_prediction(tmp_path: Path) -> None:
    with training(tmp_path) as (lab, run):
        lab.limit(BANDWIDTH / 20)
        assert [run.wait(host) for host in range(2)] == [0, 0], run.said(0)
    assert result_of(tmp_path)["metrics"]["prediction_error"] > 0.5
