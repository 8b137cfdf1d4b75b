"""Recipes whose layers swap: the cluster's copy rate and the host's memory."""

from pathlib import Path

import pytest

from pipebench.errors import PlanError
from pipebench.recipe.load import load
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.simulated import simulate_epoch

RECIPE = """\
name: small
model: {name: gnmt8, hidden_size: 8, source_vocabulary: 128, target_vocabulary: 128}
dataset: {name: number_words}
train: {minibatch_size: 32, optimizer: {name: adam, lr: 1}, max_epochs: 1}
cluster: {name: small.yaml, servers: 2}
parallelism: {mode: pipedream, plan: straight, swap_layers: ["*"]}
engine: {kind: simulated}
"""
CLUSTER = """\
device: {value: V100, assumed: a test}
memory: {value: 1 GB, assumed: a test}
levels:
  - name: server
    count: {value: 2, assumed: a test}
    bandwidth: {value: 10 GB/s, assumed: a test}
    latency: {value: 10 us, assumed: a test}
  - name: cluster
    count: {value: 1, assumed: a test}
    bandwidth: {value: 1 GB/s, assumed: a test}
    latency: {value: 10 us, assumed: a test}
"""


def job_of(folder: Path, *lines: str) -> Job:
    (folder / "small.yaml").write_text("\n".join([*lines, CLUSTER]))
    (folder / "recipe.yaml").write_text(RECIPE)
    loaded = load(str(folder / "recipe.yaml"), [])
    return prepare(loaded.recipe, loaded.cluster)


def test_a_cluster_without_a_copy_rate_is_refused_for_swap(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"layers of stages 0, 1, 2, 3 swap, and cluster small doesn't .* add .*pcie: "):
        job_of(tmp_path)


def test_a_run_reports_its_copied_bytes(tmp_path: Path) -> None:
    job = job_of(tmp_path, "pcie: {value: 1 GB/s, assumed: a test}")
    setup, count = job.setup, job.setup.sampler.minibatches_per_epoch
    forecast = MemoryForecast(job)
    result, _ = simulate_epoch(job, forecast)
    metrics, on_hosts = result.metrics, forecast.memory.host_peaks
    assert [row["host_peak_bytes"] for row in result.stages] == [*on_hosts]
    assert metrics["host_peak_bytes_max"] == max(on_hosts) > 0
    sizes = [setup.sampler.size(minibatch) for minibatch in range(count)]
    copied = sum(stage.swap_bytes[size] for stage in setup.costs.stages for size in sizes)
    assert metrics["swap_bytes_out"] == metrics["swap_bytes_in"] == copied > 0
    assert 0 < metrics["swap_stall_fraction"] < metrics["bubble_fraction"]
    assert metrics["recompute_fraction"] == 0
    assert metrics["effective_fraction"] + metrics["bubble_fraction"] == pytest.approx(1)
    could = 4 * metrics["total_time_s"] * 1e9
    assert metrics["pcie_in_fraction"] == pytest.approx((copied + metrics["comm_bytes_total"]) / could)


def test_a_host_without_memory_for_swapped_tensors_is_reported(tmp_path: Path) -> None:
    pcie = "pcie: {value: 1 GB/s, assumed: a test}"
    forecast = MemoryForecast(job_of(tmp_path, pcie))
    peaks = forecast.memory.host_peaks
    most = max(sum(peaks[:2]), sum(peaks[2:]))
    assert min(peaks) > 0
    assert not forecast.out_of_memory
    for room, says in ((most, False), (most - 1, True)):
        found = MemoryForecast(
            job_of(tmp_path, pcie, f"host_memory: {{value: {room} B, assumed: a test}}")
        ).out_of_memory
        assert bool(found) == says
    host = 0 if sum(peaks[:2]) == most else 1
    assert found.startswith(f"out of memory on host {host}: its workers swap ")
    assert "fewer layers that swap" in found
