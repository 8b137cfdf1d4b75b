"""The cost of kernel launches: as many as torch's tracer finds, each no shorter than its launch, then a pause."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from pipebench.model.graph import trace
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import DEVICES, device_of
from pipebench.profile.efficiencies import LAUNCH_S, SHIPPED
from pipebench.profile.recurrent import GpuKernels
from pipebench.profile.request import ProfileRequest
from pipebench.profile.roofline import Roofline
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.bert import bert_base
from pipebench.zoo.cellnet import cellnet
from pipebench.zoo.mnist5k import mnist5k
from pipebench.zoo.registry import Dataset
from pipebench.zoo.transformer import transformer
from pipebench.zoo.wmt16 import VOCABULARY, wmt16
from pipebench.zoo.wmt16_segments import wmt16_segments
from tests.oracles.launches import launches
from tests.support import Blobs

V100 = DEVICES["V100"]
SGD = OptimizerRecipe("sgd", lr=0.1)


def small_bert() -> nn.Module:
    return bert_base(num_layers=2, width=16, feed_forward=32, num_heads=2, vocabulary=VOCABULARY, dropout=0.0)


def small_transformer() -> nn.Module:
    return transformer(num_layers=1, width=16, feed_forward=32, num_heads=2, dropout=0.0)


@pytest.mark.parametrize(
    ("make", "dataset"),
    [
        pytest.param(small_bert, wmt16_segments(columns=16), marks=pytest.mark.slow),
        (small_transformer, wmt16()),
        pytest.param(cellnet, mnist5k(), marks=pytest.mark.slow),
    ],
)
def test_kernels_are_as_many_as_torchs_tracer_finds(make: Callable[[], nn.Module], dataset: Dataset) -> None:
    """A pause of a second per kernel makes seconds their number; backwards differ in how gradients that meet add up."""
    with torch.device("meta"):
        graph = trace(make())
    rows = analytic_profile(ProfileRequest(graph, dataset, [2], SGD, ""), replace(V100, pause_s=1.0)).layers[2]
    forward, backward = launches(make(), dataset, 2)
    assert round(sum(row.forward_s for row in rows)) == forward
    assert sum(row.backward_s for row in rows) == pytest.approx(backward, rel=0.05)


def test_every_kernel_takes_its_launch_at_least_and_pauses() -> None:
    """By hand: a product and its bias are one kernel, so is an activation; the first layer has two gradients."""
    graph = trace(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double())
    slow = replace(V100, launch_s=20e-6, pause_s=300e-6)
    first, relu, last, _ = analytic_profile(ProfileRequest(graph, Blobs(), [2], SGD, ""), slow).layers[2]
    assert [row.forward_s for row in (first, relu, last)] == pytest.approx([320e-6] * 3)
    assert [row.backward_s for row in (first, relu, last)] == pytest.approx([640e-6, 320e-6, 960e-6])
    profile = analytic_profile(ProfileRequest(graph, Blobs(), [2], SGD, ""), slow)
    assert profile.update_floor_s == pytest.approx(320e-6)
    assert "20 us per kernel and 300 us of pause after it;" in profile.note


def test_a_pause_comes_on_top_of_a_long_kernel_and_a_launch_does_not() -> None:
    x = torch.empty(2048, 2048, device="meta")

    def seconds(launch_s: float = LAUNCH_S, pause_s: float = 0.0) -> float:
        with Roofline(replace(V100, launch_s=launch_s, pause_s=pause_s)) as roofline:
            x @ x
        return float(roofline.seconds)

    whole = 2 * 2048**3 / (V100.flops_per_s * SHIPPED.product)
    assert seconds() == seconds(launch_s=whole / 2) >= whole > 100 * LAUNCH_S
    assert seconds(pause_s=0.5) == pytest.approx(seconds() + 0.5)
    assert seconds(launch_s=3.0, pause_s=0.5) == pytest.approx(3.5)


def test_kernels_of_cudnn_have_no_pause_between_them() -> None:
    with torch.device("meta"):
        lstm, x = nn.LSTM(8, 8), torch.empty(5, 2, 8)

    def kernels_and_seconds(pause_s: float) -> tuple[int, float]:
        with Roofline(replace(V100, pause_s=pause_s)) as roofline, GpuKernels():
            lstm(x)
        return roofline.launches, roofline.seconds

    (several, seconds), (_, paused) = kernels_and_seconds(0.0), kernels_and_seconds(1.0)
    states = 2  # hidden state and cell are filled with zeros by the host
    assert several > 2 * 5 + states
    assert paused - seconds == pytest.approx(states)


def test_a_cluster_may_give_its_hosts_launch_times(tmp_path: Path) -> None:
    own = "extends: cluster-a\nlaunch: {value: 25 us, assumed: test}\npause: {value: 0.3 ms, calibrated: on a cell}\n"
    (tmp_path / "own.yaml").write_text(own)
    assert device_of(load_cluster("cluster-a", 1)) == V100
    assert device_of(load_cluster(str(tmp_path / "own.yaml"), 1)) == replace(V100, launch_s=25e-6, pause_s=3e-4)
