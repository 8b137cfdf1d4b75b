"""On devices too small for plain PipeDream, plans that swap or recompute train with the bits of unlimited devices."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pipebench.engine.admission import StopRequest
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import PlanError
from pipebench.recipe.load import load
from pipebench.simulate.meter import MEMORY, PLAN
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.metrics import EarlierWorkers, recipe_notes, run_notes
from pipebench.train.prepare import prepare
from tests.support import parameters_of

RECIPE = """\
name: small
model: {name: vgg16, width: 0.0625, batch_norm: true, num_classes: 10, in_channels: 1, image_size: 32, init: kaiming}
dataset: {name: mnist5k}
train: {minibatch_size: 8, optimizer: {name: sgd, lr: 0.02, momentum: 0.9}, max_epochs: 1}
cluster: {name: small.yaml}
parallelism: {mode: pipedream, depth: 4}
"""
CLUSTER = """\
device: {{value: V100, assumed: a test}}
memory: {{value: {memory}, assumed: a test}}
pcie: {{value: 16 GB/s, assumed: a test}}
levels:
  - name: server
    count: {{value: 4, assumed: a test}}
    bandwidth: {{value: 10 GB/s, assumed: a test}}
    latency: {{value: 10 us, assumed: a test}}
    efficiency: {{value: 1, assumed: a test}}
"""


def job_of(folder: Path, memory: str, overrides: Sequence[str] = ()) -> Job:
    (folder / "small.yaml").write_text(CLUSTER.format(memory=memory))
    (folder / "recipe.yaml").write_text(RECIPE)
    loaded = load(str(folder / "recipe.yaml"), overrides)
    return prepare(loaded.recipe, loaded.cluster)


def trained(job: Job) -> VirtualEngine:
    engine = on_virtual_clock(job, StopRequest())(lambda *_: None, lambda *_: None)
    assert isinstance(engine, VirtualEngine)
    engine.train(0, 13)
    engine.train(13, 7)
    return engine


def cuts_of(job: Job) -> str:
    names = [layer.name for layer in job.setup.graph.layers]
    return f"[{', '.join(names[stage.start] for stage in job.setup.plan.stages[1:])}]"


def has_the_bits_of_unlimited_devices(folder: Path, job: Job, limit: int) -> bool:
    """Train a job within a limit, and the same plan on devices without one, where it keeps everything."""
    engine = trained(job)
    assert max(engine.peak_bytes) <= limit
    wide = job_of(folder, "null", ["parallelism.plan=straight", f"parallelism.cuts={cuts_of(job)}"])
    assert {policy for stage in wide.setup.plan.stages for policy in stage.memory} == {"keep"}
    other = trained(wide)
    assert max(other.peak_bytes) > limit
    found, expected = parameters_of(engine), parameters_of(other)
    assert len(found) > 20
    return all(torch.equal(parameter, expected[name]) for name, parameter in found.items())


def test_a_plan_that_does_not_fit_trains_if_its_stages_swap(tmp_path: Path) -> None:
    """A plan that a recipe gives is run unchanged, with a note."""
    pytest.importorskip("mlxtend")
    keeping = job_of(tmp_path, "3 MB", ["parallelism.plan=straight"])
    assert "out of memory" in MemoryForecast(keeping).out_of_memory
    job = job_of(tmp_path, "3 MB", ["parallelism.plan=straight", "parallelism.vpipe={recompute: false}"])
    assert [stage.memory.count("swap") for stage in job.setup.plan.stages] == [13, 0, 0, 0]
    assert MemoryForecast(job).out_of_memory == ""
    assert has_the_bits_of_unlimited_devices(tmp_path, job, 3_000_000)


def test_the_minibatch_that_is_advised_fits_and_a_larger_one_does_not(tmp_path: Path) -> None:
    asked = ["parallelism.plan=1-1", "parallelism.depth=1"]

    def advice(memory: str, minibatch_size: int) -> str:
        job = job_of(tmp_path, memory, [*asked, f"train.minibatch_size={minibatch_size}"])
        return MemoryForecast(job).out_of_memory

    found = re.search(r"what would help: train\.minibatch_size: (\d+), or more stages$", advice("3 MB", 64))
    assert found
    advised = int(found[1])
    assert advice("3 MB", advised) == ""
    assert advice("3 MB", advised + 1) != ""
    assert advice("1500 kB", 64).endswith("what would help: more stages")  # not the other worker


def test_a_model_without_a_plan_trains_if_it_recomputes(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    with pytest.raises(PlanError, match="no plan of mode pipedream fits"):
        job_of(tmp_path, "1500 kB", ["parallelism.shard=none", "parallelism.recompute=false"])
    job = job_of(tmp_path, "1500 kB", ["parallelism.recompute=true"])
    assert MemoryForecast(job).out_of_memory == ""
    assert has_the_bits_of_unlimited_devices(tmp_path, job, 1_500_000)


def test_cuts_for_layers_that_recompute_are_reported(tmp_path: Path) -> None:
    """Planned cuts differ if layers recompute, and with them a pipeline's staleness and weights."""
    asked = ["parallelism.plan=straight", "parallelism.recompute_layers=['features_*']"]
    said = "cut for layers that recompute: cuts may be others without, unless named"
    job = job_of(tmp_path, "3 GB", asked)
    assert recipe_notes(job) == {PLAN: said}
    assert recipe_notes(job_of(tmp_path, "3 GB", [*asked, f"parallelism.cuts={cuts_of(job)}"])) == {}
    assert recipe_notes(job_of(tmp_path, "3 GB", asked[:1])) == {}


def test_a_run_that_exceeded_a_device_s_memory_reports_it(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    job = job_of(tmp_path, "3 MB", ["parallelism.plan=straight"])
    said = "worker 1 (stage 1) held 3.30 MB, more than the 3.00 MB of a V100"
    assert run_notes(job, {"peak_bytes": [700_000, 3_300_000, 3_100_000, 0]}, EarlierWorkers()) == {MEMORY: said}
    assert run_notes(job, {"peak_bytes": [700_000, 3_000_000, 0, 0]}, EarlierWorkers()) == {}


@pytest.mark.parametrize(("servers", "chosen"), [(1, "ordered"), (4, "ring")])
def test_the_order_of_sums_chosen_for_the_links_is_reported(tmp_path: Path, servers: int, chosen: str) -> None:
    """Servers of four devices share a port: a ring has one connection over it, ordered sums all pairs."""
    parallelism, cluster = "{mode: zero1}", f"{{name: cluster-a, servers: {servers}}}"
    written = RECIPE.replace("{mode: pipedream, depth: 4}", parallelism).replace("{name: small.yaml}", cluster)
    (tmp_path / "recipe.yaml").write_text(written)
    notes = {}
    for asked in ([], ["parallelism.sums=ring"], ["parallelism.sums=ordered"]):
        loaded = load(str(tmp_path / "recipe.yaml"), asked)
        notes["".join(asked)] = recipe_notes(prepare(loaded.recipe, loaded.cluster, trains=False, whole_only=True))
    assert notes.pop("") == {PLAN: f"sums: {chosen}, chosen for the cluster's links"}
    assert [*notes.values()] == [{}, {}]


@pytest.mark.parametrize(("mode", "workers", "noted"), [("fsdp", 2, True), ("fsdp", 4, False), ("zero2", 2, False)])
def test_layers_that_a_shared_parameter_keeps_in_one_group_are_noted(mode: str, workers: int, *, noted: bool) -> None:
    """On two workers a second copy of the matrix would take more memory than it saves."""
    words = [f"parallelism.mode={mode}", "parallelism.sums=ring", "model.share_embedding=true"]
    loaded = load("small/gpt2/dp", [*words, f"cluster.count={workers}"])
    job = prepare(loaded.recipe, loaded.cluster, trains=False)
    note = "words and classifier share words.weight and stay together in stage 0"
    assert recipe_notes(job).get(PLAN) == (note if noted else None)
    assert bool(job.setup.pipeline.ties) == (workers == 4)
