"""Complete labs: training, written files, and removal after every kind of end."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipebench.distributed.launch_child import python_module
from tests.lab import cleaner
from tests.lab.machine import needs_a_lab
from tests.patience import PATIENCE_S, wait_for

pytestmark = [needs_a_lab, pytest.mark.lab]

SMALL = ("model.width=0.0625", "train.target=null", "train.max_epochs=1", "train.minibatch_size=32")
COMMAND = python_module("tests.lab")


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    # As a terminal's: Ctrl-C reaches what is in its process group.
    with (folder / "said.txt").open("w") as file:
        return subprocess.Popen([*COMMAND, *words], cwd=folder, stdout=file, stderr=file, text=True, process_group=0)


def output(folder: Path) -> str:
    return (folder / "said.txt").read_text()


def namespaces_of(pid: int) -> list[str]:
    return [name for name in os.listdir(cleaner.NETNS) if name.startswith(f"pipebench-lab-{pid}.")]


def test_two_recipes_across_a_wire(tmp_path: Path) -> None:
    """The wire carries the logged bytes and little else; predictions are written before anything trains."""
    process = start(tmp_path, "lab/dp", "lab/pipedream", *SMALL, "--bandwidth", "300Mbit")
    assert process.wait(PATIENCE_S) == 0, output(tmp_path)
    assert namespaces_of(process.pid) == []
    out = tmp_path / "pipebench-lab"
    found: dict[str, Any] = json.loads((out / "lab.json").read_text())
    assert [(run["recipe"], run["outcome"]) for run in found["runs"]] == [
        ("lab-dp", "completed"),
        ("lab-pipedream", "completed"),
    ]
    for run in found["runs"]:
        passed, metrics = run["passed"], run["metrics"]
        logged = sum(metrics.get(f"comm_bytes_{name}", 0) for name in ("total", "buffers", "evaluation"))
        assert passed["payload_bytes"] == logged > 4_000_000
        # A wire counts every piece's headers; rendezvous, heartbeats and messages' own headers are a few hundred kB
        # each minute, and a run's minutes depend on how loaded the machine is.
        assert 1.0 < passed["wire_bytes"] / logged < 1.5
        assert metrics["predicted_epoch_time_s"] > 0
    wire = found["wires"][0]
    assert wire["goodput_bytes_per_s"] < wire["bandwidth_bytes_per_s"] == 300e6 / 8
    predicted = json.loads((out / "predictions.json").read_text())["predictions"]
    assert [row["recipe"] for row in predicted] == ["lab-dp", "lab-pipedream"]
    assert predicted[0]["throughput_samples_per_s"] == found["runs"][0]["predicted"]["throughput_samples_per_s"]
    first_log = min(path.stat().st_ctime for path in tmp_path.glob("pipebench-runs/*/recipe.yaml"))
    assert (out / "predictions.json").stat().st_mtime < first_log
    assert (tmp_path / "mlflow.db").is_file()
    assert (out / "lab.png").stat().st_size > 10_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lab_is_removed_for_every_signal(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "lab/pipedream", *SMALL, "train.max_epochs=1000", "--bandwidth", "300Mbit")
    log = tmp_path / "pipebench-lab" / "logs" / "lab-pipedream-300Mbit.log"
    wait_for(lambda: "training" in (log.read_text() if log.exists() else ""), "training to begin")
    inside = [pid for name in namespaces_of(process.pid) for pid in cleaner.processes_in(name)]
    assert len(inside) >= 4
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert process.wait(PATIENCE_S) == 130, output(tmp_path)
    assert namespaces_of(process.pid) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in inside)
    assert "Traceback" not in output(tmp_path)
