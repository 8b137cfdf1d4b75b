"""Profiles of mixed precision: bytes by types, with data and without; rates of tensor cores; memory as predicted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.errors import ProfileError
from pipebench.model.graph import LayerGraph, trace
from pipebench.model.precision import LOW_TYPES, in_precision
from pipebench.model.rounded_data import RoundedData
from pipebench.planner.memory import MemoryRule
from pipebench.planner.state_graph import prefixes
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.choose import profile_for, profile_request
from pipebench.profile.devices import find_device
from pipebench.profile.enough import StopRule
from pipebench.profile.measure import measured_profile
from pipebench.profile.model import Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import load
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe
from pipebench.schedule.modes import RECOMPUTE
from pipebench.train.prepare import prepare
from pipebench.zoo.registry import Dataset
from tests.engine.test_precision import Normed, blobs, images
from tests.evaluations import MODES, mode_setup, trained
from tests.models import ConvNet

SGD = OptimizerRecipe(lr=0.1, momentum=0.9)


class Recurrent(nn.Module):
    """An LSTM between linear layers; [n, 6] to [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.reshape(-1, 3, 2))[0][:, -1])


MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "conv": (ConvNet, images), "normed": (Normed, blobs), "recurrent": (Recurrent, blobs)
}  # fmt: skip


def lowered(name: str, precision: str) -> tuple[LayerGraph, Dataset]:
    model, data = MODELS[name]
    graph = in_precision(trace(model()), precision)
    return graph, RoundedData(data(), LOW_TYPES[precision])


@pytest.mark.parametrize("precision", LOW_TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_shapes_alone_give_the_bytes_that_data_gives(name: str, precision: str) -> None:
    graph, data = lowered(name, precision)
    shapes = analytic_profile(ProfileRequest(graph, data, [4], SGD, name), find_device("V100"))
    real = measured_profile(
        ProfileRequest(graph, data, [4], SGD, name), torch.device("cpu"), StopRule(most=1), engine=EngineRecipe()
    )
    exact = {n: p.nbytes for n, p in graph.root.named_parameters()}
    for computed, measured in zip(shapes.layers[4], real.layers[4], strict=True):
        for column in ("output_bytes", "gradient_bytes", "parameter_sizes", "master_sizes", "buffer_sizes"):
            assert getattr(computed, column) == getattr(measured, column), (computed.name, column)
        assert computed.master_sizes == {n: exact[n] for n in computed.parameters}
    assert real.update_s_per_byte >= 0
    assert graph.root.get_parameter(next(iter(exact))).dtype is torch.float32


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("V100", "fp16", 112e12),
        ("V100", "bf16", 0.0),
        ("A100", "bf16", 312e12),
        ("H100", "fp16", 989e12),
        ("K80", "fp16", 0.0),
    ],
)
def test_products_run_at_the_peak_of_tensor_cores_where_there_are_some(
    device: str, precision: str, peak: float
) -> None:
    spec = find_device(device)
    assert spec.tensor_flops_per_s(LOW_TYPES[precision]) == peak

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4)
            self.b = nn.Linear(8192, 8192, bias=False, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x.new_empty(8192, 8192)).sum()

    def forward_s(precision: str) -> float:
        graph = in_precision(trace(Wide().to("meta")), precision)
        data = RoundedData(blobs(), graph.rounding.low_type) if graph.rounding else blobs()
        rows = analytic_profile(ProfileRequest(graph, data, [4], SGD, "wide"), spec).layers[4]
        return next(row.forward_s for row in rows if row.name == "b")

    ratio = forward_s("fp32") / forward_s(precision)
    # Efficiencies of the papers' devices are 0.85 of the peak without tensor cores, and 0.74 with them.
    known = {"A100": 0.86 / 0.91, "H100": 0.80 / 0.85}.get(device, 0.74 / 0.85)
    assert ratio == pytest.approx(peak / spec.flops_per_s * known if peak else 1.0, rel=0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
def test_memory_is_at_most_the_predicted(mode: str) -> None:
    """The prediction has room for transfers besides, and counts what every unit in flight keeps."""
    setup = mode_setup(
        ConvNet(), mode, [4], dataset=images(), precision="bf16",
        make_optimizer=lambda p: torch.optim.SGD(p, 0.05, 0.9),
    )  # fmt: skip
    graph, data = lowered("conv", "bf16")
    profile = analytic_profile(ProfileRequest(graph, data, [2, 4], SGD, "conv"), find_device("V100"))
    rows = profile.layers[4 // setup.pipeline.microbatches]
    engine = trained(setup, 8)
    versions = None if setup.pipeline.weights.startswith("stash") else 1
    rule = MemoryRule(1e9, versions, state_bytes_per_byte=1, masters=True)
    states = prefixes(rows)
    if MODES[mode].get("recompute"):
        states = states.recomputing([RECOMPUTE] * (len(rows) - 1))
    for worker in engine.workers:
        ((stage, replica),) = worker.replicas.items()
        own = setup.plan.stages[stage]
        in_flight = {False: setup.pipeline.warmups[stage], True: 4}[setup.pipeline.order == "all-forwards"]
        predicted = rule.num_bytes(states, own.start, own.stop, in_flight)
        assert worker.peaks.device_bytes <= predicted
        assert worker.peaks.device_bytes > 0.5 * predicted or MODES[mode].get("recompute")
        kept = replica.weights
        assert profile.has_masters
        assert kept.master_bytes == kept.state_bytes == states.stepped_bytes[own.stop] - states.stepped_bytes[own.start]
        assert kept.version_bytes == states.parameter_bytes[own.stop] - states.parameter_bytes[own.start]


def test_a_stored_profile_is_of_one_precision(tmp_path: Path) -> None:
    loaded = load("modes/pipedream-bf16", ["parallelism.plan=straight"])
    job = prepare(loaded.recipe, loaded.cluster, trains=False)
    assert job.profile.precision == "bf16"
    path = tmp_path / "profile.json"
    path.write_text(write_profile(job.profile))

    def use(precision: str) -> Profile:
        again = load("modes/pipedream-bf16", [f"engine.timing={path}", f"train.precision={precision}"])
        return prepare(again.recipe, again.cluster, trains=False).profile

    assert use("bf16").layers == job.profile.layers
    with pytest.raises(ProfileError, match=r"profile .* is of precision bf16, train.precision is fp32"):
        use("fp32")


def test_the_cache_knows_precisions_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path))
    loaded = load("modes/pipedream-bf16")
    setup = mode_setup(ConvNet(), "single", [], dataset=images())
    found = {}
    for precision in ("fp32", "bf16", "fp32"):
        recipe = replace(loaded.recipe, train=replace(loaded.recipe.train, precision=precision))
        graph = in_precision(setup.graph, precision)
        request = profile_request(recipe, graph, setup.dataset, [4])
        profile = profile_for(recipe, loaded.cluster, request, torch.device("cpu"))
        found[precision] = profile.layers[4][0].parameter_bytes
    assert found["fp32"] == 2 * found["bf16"]
