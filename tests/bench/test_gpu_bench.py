"""The bench of GPUs, run on the CPU by the same code."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipebench.cluster import Cluster, Level
from pipebench.model.device import torch_settings
from pipebench.zoo.mnist5k import mnist5k
from tests.bench import gpu
from tests.bench.processes import machine, workers
from tests.bench.processes.machine import Machine
from tests.bench.processes.references import DDP
from tests.bench.processes.rows import SINGLE_ON_GPU, TORCHS_ON_GPU, Row
from tests.bench.processes.sides import OURS, PLAIN, REFERENCES, settings_of
from tests.bench.processes.subject import SETTINGS, Subject
from tests.support import unit_profile

NARROW = Subject(width=0.0625, minibatch_size=16)
ALONE = (Row("single+free+bf16+channels_last", f"{PLAIN}+free+bf16+channels_last", 0.98, 1),)
TWO = (Row(f"{OURS[DDP]}+free", f"{DDP}+free", 1.0, 2),)


def costs(subject: Subject, num_processes: int, environment: dict[str, str]) -> Machine:
    profile = unit_profile(subject.graph(), mnist5k(), machine.sizes(subject, num_processes))
    return Machine(profile, {}, Cluster("loopback", "local", None, (Level("machine", num_processes, 5e9, 50e-6),)))


@pytest.mark.slow
def test_the_page_has_every_comparison_with_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are given, since measuring takes long."""
    monkeypatch.setattr(machine, "measure", costs)
    lines = list(gpu.measured(NARROW, 1, {}, "nox -s gpu-bench -- --pairs 1", (ALONE, TWO)))
    assert lines[0] == "# Against plain PyTorch on a GPU"
    assert lines[2].startswith("Written by `nox -s gpu-bench -- --pairs 1` on ")
    assert "1 x CPU, " in lines[2]
    assert f"torch {torch.__version__}" in lines[2]
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and " against " in line]
    assert [row[0] for row in cells] == [f"{row.ours} against {row.theirs}" for row in (*ALONE, *TWO)]
    for row in cells:
        assert float(row[1]) > 0
        assert re.fullmatch(r"\d+\.\d{3} to \d+\.\d{3}", row[2])
        assert all(float(rate.replace(",", "")) > 0 for rate in row[6:8])
    assert [row[9] == "-" for row in cells] == [False] * 2
    assert sum("relative distance" in line for line in lines) == 2
    assert all(line.endswith("the same work") for line in lines if "relative distance" in line)
    assert not any("NOT" in line for line in lines)


def test_noise_and_settings_reach_both_sides() -> None:
    images = Subject(width=0.0625, minibatch_size=16, image_size=48)
    assert images.data().example(2)["image"].shape == (2, 3, 48, 48)
    assert images.with_settings("tf32", "free").engine.tf32
    tried = {}
    for name in ("untried", "free"):
        with torch_settings(workers.engine("cuda")), images.with_settings(name).settings():
            assert not torch.are_deterministic_algorithms_enabled()
            tried[name] = torch.backends.cudnn.benchmark
    assert tried == {"untried": False, "free": True}
    known = {*REFERENCES, *OURS.values()}
    for row in (*SINGLE_ON_GPU, *TORCHS_ON_GPU):
        for side in (row.ours, row.theirs):
            assert side.split("+")[0] in known
            assert {*settings_of(side)} <= SETTINGS.keys()


@pytest.mark.parametrize(("words", "num_alone"), [([], len(SINGLE_ON_GPU)), (["--short", "--pairs", "1"], 3)])
def test_a_short_page_leaves_out_comparisons_of_one_process(
    words: list[str], num_alone: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []

    def measured(*found: Any) -> list[str]:
        given.extend(found)
        return ["# a page"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["gpu", *words, "--out", str(tmp_path / "gpu.md")])
    gpu.main()
    _, pairs, environment, _, (alone, two) = given
    assert (len(alone), two) == (num_alone, TORCHS_ON_GPU)
    assert {row.ours for row in alone} <= {row.ours for row in SINGLE_ON_GPU}
    assert pairs == (1 if words else 7)
    assert environment
    assert (tmp_path / "gpu.md").read_text() == "# a page\n"


def test_without_a_gpu_the_bench_prints_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    before = gpu.PAGE.exists()
    with pytest.raises(SystemExit, match="gpu-bench: torch sees no CUDA device here, so there is nothing to measure"):
        gpu.main()
    assert gpu.PAGE.exists() is before
