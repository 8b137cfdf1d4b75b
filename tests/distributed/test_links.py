"""Links are measured between real processes and written as a cluster."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.overrides import TorchFunctionMode

from pipebench.__main__ import main
from pipebench.cli import links
from pipebench.cli.main import cli
from pipebench.distributed import links as measured
from pipebench.distributed.links import MeasuredLevel, MeasuredLinks, copies
from pipebench.recipe.clusters import load_cluster, sources
from pipebench.run.links import cluster_text
from tests.commands import CopiedCommand
from tests.made_up_gpu import made_up_gpu
from tests.processes import reserved_port


def level(name: str, port: float, pair: float, ring: float) -> MeasuredLevel:
    return MeasuredLevel(name, 2, port, pair, ring, 12.34e-6, 1 << 20)


def test_a_limit_is_written_only_if_it_is_reached(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    found = (level("server", 1e11, 1e11, 7e10), level("cluster", 4e9, 1e9, 0.98e9))
    path.write_text(cluster_text(MeasuredLinks("NVIDIA H100", "NCCL", found, 5e10), links._MADE_BY))
    server, cluster = load_cluster(str(path), 1).levels
    assert load_cluster(str(path), 1).pcie_bytes_per_s == 5e10
    assert (server.bandwidth_bytes_per_s, server.flow_bytes_per_s, server.ring_bytes_per_s) == (1e11, None, 7e10)
    assert (cluster.bandwidth_bytes_per_s, cluster.flow_bytes_per_s, cluster.ring_bytes_per_s) == (4e9, 1e9, None)
    assert server.latency_s == pytest.approx(12.3e-6)
    assert sources(path) == "numbers: 2 assumed, 9 measured"
    assert links._is_ours(path)


def test_copies_go_between_a_gpu_and_pinned_memory() -> None:
    copied: list[tuple[str, str]] = []

    class Noted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                copied.append((args[1].device.type, args[0].device.type))
                assert all(each.is_pinned() for each in args if each.device.type == "cpu")
            return func(*args, **(kwargs or {}))

    with made_up_gpu():
        run = copies(torch.device("cuda"), 1 << 10)
        with Noted():
            run()
    assert copied == [("cuda", "cpu"), ("cpu", "cuda")]


def measure_briefly() -> None:
    """Call the command line, whose messages needn't be long enough for a rate that is exact."""
    measured._LONG_S = measured._LONG_S / 50
    main()


def test_two_processes_measure_the_link_between_them(tmp_path: Path) -> None:
    """By settings with which each is alone on its host."""
    words = ["links", "--device", "cpu", "--out", "ours.yaml"]
    files = [tmp_path / f"said-{rank}.txt" for rank in range(2)]
    with reserved_port() as reserved, contextlib.ExitStack() as stack:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(reserved.getsockname()[1])}
        both = [
            stack.enter_context(
                CopiedCommand(words, tmp_path, file, file, {**place, "RANK": str(rank)}, measure_briefly)
            )
            for rank, file in enumerate(files)
        ]
        codes = [each.wait() for each in both]
    outputs = [file.read_text() for file in files]
    assert codes == [0, 0], outputs
    assert "written  ours.yaml" in outputs[0]
    assert "written" not in outputs[1]
    (found,) = load_cluster(str(tmp_path / "ours.yaml"), 1).levels
    assert (found.name, found.count) == ("cluster", 2)
    # Loopback: slower than memory, faster than a slow network, on any machine.
    assert 1e6 < found.bandwidth_bytes_per_s < 1e12
    assert 1e-7 < found.latency_s < 1.0


@pytest.mark.parametrize(
    ("words", "environ", "problem"),
    [
        ([], {}, "links join processes, and there is one: start as many as there are GPUs, here by --workers 4"),
        (["--workers", "2"], {"RANK": "0"}, "--workers: a launcher has started the processes already, leave it out"),
        (["--out", "other.yaml"], {"RANK": "0"}, "--out: other.yaml"),
        ([], {"RANK": "0", "WORLD_SIZE": "1"}, "links join processes, and there is one"),
        (["--workers", "2", "--device", "cpu"], {}, "processes on the CPUs of one host share memory, and use no link"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(
    words: list[str], environ: dict[str, str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("name: other\n")
    result = CliRunner(env=environ).invoke(cli, ["links", *words])
    assert result.exit_code == 2, result.output
    assert problem in " ".join(result.output.split())
    assert not (tmp_path / "cluster.yaml").exists()
