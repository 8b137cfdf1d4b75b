"""The cost model's prediction for a plan beside the simulated one: PipeDream, section 3.1."""

from pathlib import Path

import pytest

from pipebench.recipe.load import load
from pipebench.train.job import Job
from pipebench.train.prepare import prepare
from pipebench.train.simulated import simulate_epoch

METRIC = "planned_throughput_samples_per_s"
RECIPE = """\
name: small
model: {name: vgg16, width: 0.25}
dataset: {name: synthetic, shape: [3, 224, 224], num_train: 6400}
train: {minibatch_size: 32, optimizer: {lr: 1}, max_epochs: 1}
cluster: {name: fast.yaml}
parallelism: {mode: pipedream, plan: straight}
engine: {kind: simulated}
"""
FAST = """\
device: {value: V100, assumed: a test}
memory: {value: 16 GB, assumed: a test}
levels:
  - name: server
    count: {value: 4, assumed: a test}
    bandwidth: {value: 1000000 GB/s, assumed: a test}
    latency: {value: 0 us, assumed: a test}
    efficiency: {value: 1, assumed: a test}
"""


def job_of(folder: Path, *words: str) -> Job:
    (folder / "fast.yaml").write_text(FAST)
    (folder / "recipe.yaml").write_text(RECIPE)
    loaded = load(str(folder / "recipe.yaml"), list(words))
    return prepare(loaded.recipe, loaded.cluster)


@pytest.mark.parametrize(("plan", "is_all"), [("straight", True), ("2-1-1", False), ("3-1", False)])
def test_the_planned_throughput_is_the_slowest_stage_s(tmp_path: Path, plan: str, is_all: bool) -> None:
    """Where links are free: its forward, backward and update; or less, where too few minibatches are in flight."""
    result, _ = simulate_epoch(job_of(tmp_path, f"parallelism.plan={plan}"))
    slowest_s = max((row["forward_s"] + row["backward_s"] + row["update_s"]) / row["replicas"] for row in result.stages)
    planned, simulated = result.metrics[METRIC], result.metrics["throughput_samples_per_s"]
    assert simulated <= 1.001 * planned <= 1.003 * 32 / slowest_s
    assert not is_all or planned == pytest.approx(32 / slowest_s, rel=1e-3)


@pytest.mark.parametrize("count", [1, 4, 10])
def test_an_update_of_several_rounds_shares_its_sum_and_its_step(tmp_path: Path, count: int) -> None:
    words = (f"parallelism={{mode: dp, plan: '4', accumulate: {count}}}", "cluster.bandwidth=1 GB/s")
    metrics = simulate_epoch(job_of(tmp_path, *words))[0].metrics
    assert metrics[METRIC] == pytest.approx(metrics["throughput_samples_per_s"], rel=0.02)


@pytest.mark.parametrize("mode", ["model", "gpipe"])
def test_pipelines_that_flush_have_no_planned_throughput(tmp_path: Path, mode: str) -> None:
    result, _ = simulate_epoch(job_of(tmp_path, f"parallelism.mode={mode}"))
    assert METRIC not in result.metrics
