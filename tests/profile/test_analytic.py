"""The analytic profile against closed formulas."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipebench.errors import ProfileError
from pipebench.model.graph import trace
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import DEVICES, DeviceSpec, find_device
from pipebench.profile.efficiencies import LAUNCH_S, SHIPPED
from pipebench.profile.model import Profile
from pipebench.profile.recurrent import GpuKernels
from pipebench.profile.request import ProfileRequest
from pipebench.profile.roofline import Roofline
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.mnist5k import mnist5k
from pipebench.zoo.vgg import vgg16
from tests.models import HalfFrozen
from tests.support import Blobs

SGD = OptimizerRecipe("sgd", lr=0.1)
V100 = DEVICES["V100"]


class Images(Blobs):
    """ImageNet's shapes, no data."""

    inputs: Sequence[str] = ("image",)

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        image = torch.empty(num_samples, 3, 224, 224, device="meta")
        return {"image": image, "label": torch.empty(num_samples, dtype=torch.int64, device="meta")}


def full_vgg(size: int) -> Profile:
    with torch.device("meta"):
        graph = trace(vgg16())
    return analytic_profile(ProfileRequest(graph, Images(), [size], SGD, "vgg16"), V100)


def test_flops_of_a_convolution() -> None:
    convolution = nn.Conv2d(8, 16, 3, padding=1, device="meta")
    x = torch.empty(4, 8, 10, 12, device="meta", requires_grad=True)
    forward = 2 * 4 * 16 * 10 * 12 * 8 * 9
    with Roofline(V100) as roofline:
        y = convolution(x)
    assert roofline.flops == forward
    assert roofline.moved_bytes == (4 * 8 * 120 + 16 * 8 * 9 + 16 + 4 * 16 * 120) * 4
    with Roofline(V100) as roofline:
        torch.autograd.grad([y], [x, *convolution.parameters()], [torch.empty_like(y)])
    assert roofline.flops == 2 * forward
    assert roofline.launches == 3


def test_flops_of_vgg_equal_torchs_counter() -> None:
    with torch.device("meta"):
        model, x = vgg16(), torch.empty(2, 3, 224, 224)
    with Roofline(V100) as roofline, FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert roofline.flops == counter.get_total_flops()


def test_a_layer_is_bound_by_arithmetic_memory_or_launch() -> None:
    def seconds(x: torch.Tensor, work: nn.Module) -> float:
        with Roofline(V100) as roofline:
            work(x)
        return float(roofline.seconds)

    meta = torch.device("meta")
    arithmetic = seconds(torch.empty(4096, 4096, device=meta), nn.Linear(4096, 4096, device=meta))
    waves = math.ceil(64 * 64 * 4 / 80) / (64 * 64 * 4 / 80)  # of tiles of 64 x 64 over 80 multiprocessors
    assert arithmetic == pytest.approx(waves * 2 * 4096**3 / (V100.flops_per_s * SHIPPED.product), rel=0.02)
    memory = seconds(torch.empty(4096, 4096, device=meta), nn.ReLU())
    assert memory == pytest.approx(2 * 4 * 4096**2 / (V100.memory_bytes_per_s * SHIPPED.memory))
    assert seconds(torch.empty(4, device=meta), nn.ReLU()) == LAUNCH_S
    assert seconds(torch.empty(4, 4, device=meta), nn.Flatten(0)) == 0


def test_winograd_only_where_it_applies() -> None:
    def seconds_per_flop(channels: int, kernel: int, stride: int) -> float:
        x = torch.empty(16, channels, 56, 56, device="meta")
        with Roofline(V100) as roofline:
            nn.Conv2d(channels, 256, kernel, stride, kernel // 2, device="meta")(x)
        return float(roofline.seconds / roofline.flops)

    direct = 1 / (V100.flops_per_s * SHIPPED.convolution)
    assert seconds_per_flop(256, 3, 1) < 0.5 * direct
    assert seconds_per_flop(256, 3, 2) == pytest.approx(direct)
    assert seconds_per_flop(256, 5, 1) == pytest.approx(direct)


def test_a_product_of_few_rows_leaves_most_of_the_device_idle() -> None:
    def seconds(rows: int, columns: int) -> float:
        with Roofline(V100) as roofline:
            torch.empty(rows, 4096, device="meta") @ torch.empty(4096, columns, device="meta")
        return float(roofline.seconds)

    rate = V100.flops_per_s * SHIPPED.product
    # 32 of a tile's 64 rows are used; 64 tiles, each split in one or many, are at best as good as 64 of 80 at work.
    assert seconds(32, 4096) >= 2 * 64 * 4096**2 / rate
    assert seconds(32, 4096) == seconds(64, 4096)
    assert seconds(1024, 4096) < 1.2 * 2 * 1024 * 4096**2 / rate


def test_a_product_without_columns_takes_a_launch() -> None:
    """A layer of width 0 divided by zero, and its own forward was blamed."""
    with Roofline(V100) as roofline:
        torch.empty(8, 4, device="meta") @ torch.empty(4, 0, device="meta")
    assert roofline.seconds == V100.launch_s


def test_an_embedding_reads_only_the_rows_looked_up() -> None:
    embedding = nn.Embedding(1000, 16, device="meta")
    words = torch.empty(7, dtype=torch.int64, device="meta")
    with Roofline(V100) as roofline:
        y = embedding(words)
    assert roofline.moved_bytes == 7 * 8 + 2 * 7 * 16 * 4
    with Roofline(V100) as roofline:
        torch.autograd.grad([y], [embedding.weight], [torch.empty_like(y)])
    assert roofline.moved_bytes == 7 * 8 + 3 * 7 * 16 * 4 + 1000 * 16 * 4


def test_expanded_tensors_are_read_once() -> None:
    with Roofline(V100) as roofline:
        torch.empty(1, 8, device="meta").expand(100, 8) + torch.empty(100, 8, device="meta")
    assert roofline.moved_bytes == (8 + 2 * 800) * 4


def test_dropout_is_one_kernel_with_a_mask_of_bytes() -> None:
    x = torch.empty(10, 8, device="meta", requires_grad=True)
    with Roofline(V100) as roofline, GpuKernels():
        y = nn.Dropout(0.5)(x)
    assert (roofline.launches, roofline.moved_bytes) == (1, 80 * (4 + 4 + 1))
    with Roofline(V100) as roofline:
        torch.autograd.grad([y], [x], [torch.empty_like(y)])
    assert (roofline.launches, roofline.moved_bytes) == (1, 80 * (4 + 4 + 1))
    with Roofline(V100) as roofline, GpuKernels():
        assert nn.Dropout(0.5).eval()(x) is x
    assert roofline.launches == 0


def test_full_vgg_is_profiled_without_weights() -> None:
    rows = full_vgg(64).layers[64]
    assert len(rows) == 41
    assert sum(row.parameter_bytes for row in rows) == 4 * 138_357_544
    assert rows[-1].name == "loss"
    assert rows[0].output_bytes == 64 * 64 * 224 * 224 * 4
    flatten = next(row for row in rows if row.name == "flatten")
    assert (flatten.forward_s, flatten.backward_s) == (0, 0)


def test_weight_parts_are_about_half_of_split_backwards() -> None:
    """Of the first layer everything: nothing comes before it. Of others not half, if a bias is summed besides."""
    rows = full_vgg(64).layers[64]
    convolutions = [row for row in rows if row.kind == "Conv2d"]
    assert convolutions[0].weight_s == convolutions[0].backward_s > 0
    assert all(0.4 < row.weight_s / row.backward_s < 0.6 for row in convolutions[1:])
    assert all(row.weight_s > 0 for row in rows if row.kind == "Linear")
    assert all(row.weight_s == 0 for row in rows if row.kind not in ("Conv2d", "Linear"))


def test_sizes_are_profiled_not_scaled() -> None:
    graph = trace(vgg16(width=0.125, batch_norm=True, num_classes=10, in_channels=1, image_size=32))
    profile = analytic_profile(ProfileRequest(graph, mnist5k(), [8, 512], SGD, "narrow"), V100)
    small, large = (profile.layers[n] for n in (8, 512))
    assert [row.name for row in small] == [*(layer.name for layer in graph.layers), "loss"]
    assert sum(row.forward_s for row in large) < 64 * sum(row.forward_s for row in small)
    assert all(b.output_bytes == 64 * a.output_bytes for a, b in zip(small[:-1], large[:-1], strict=True))
    assert profile.source == "analytic"
    assert profile.device == "V100"
    assert profile.load_s[512] == pytest.approx(512 * 32 * 32 * 4 / V100.host_bytes_per_s + LAUNCH_S)


def test_the_model_keeps_its_weights_and_buffers() -> None:
    model = vgg16(width=0.125, batch_norm=True, num_classes=10, in_channels=1, image_size=32).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    analytic_profile(ProfileRequest(trace(model), mnist5k(), [8], SGD, "narrow"), V100)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training


def test_buffer_bytes_are_those_that_replicas_average() -> None:
    request = ProfileRequest(trace(HalfFrozen().double()), Blobs(shape=(2, 8, 8)), [8], SGD, "half frozen")
    sizes = [row.buffer_sizes for row in analytic_profile(request, V100).layers[8] if row.buffer_sizes]
    moving, fixed = (
        {f"features.{i}.running_{name}": size for name in ("mean", "var")} for i, size in ((1, 48), (5, 0))
    )
    assert sizes == [moving, fixed]


@pytest.mark.parametrize(
    ("optimizer", "passes"),
    [
        (OptimizerRecipe("sgd", lr=0.1, weight_decay=0.1), 3),
        (OptimizerRecipe("sgd", lr=0.1, momentum=0.9), 5),
        (OptimizerRecipe("adam", lr=0.1), 7),
    ],
)
def test_update_time_counts_the_passes_over_the_parameters(optimizer: OptimizerRecipe, passes: int) -> None:
    linear = trace(nn.Linear(6, 4, dtype=torch.float64))
    profile = analytic_profile(ProfileRequest(linear, Blobs(), [2], optimizer, "linear"), V100)
    assert profile.update_s_per_byte == passes / (V100.memory_bytes_per_s * SHIPPED.memory)
    assert profile.update_floor_s == LAUNCH_S


def test_progress_names_sizes() -> None:
    reported: list[str] = []
    graph = trace(nn.Linear(6, 4, dtype=torch.float64))
    analytic_profile(ProfileRequest(graph, Blobs(), [2, 3], SGD, "linear"), V100, reported.append)
    assert reported == ["computing all layers at 2 samples, 1 of 2", "computing all layers at 3 samples, 2 of 2"]


def test_shared_parameters_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 6, dtype=torch.float64))
    model[1].weight = model[0].weight
    rows = analytic_profile(ProfileRequest(trace(model), Blobs(), [2], SGD, "tied"), V100).layers[2]
    assert [row.parameter_bytes for row in rows] == [(36 + 6) * 8, (36 + 6) * 8, 0]


@pytest.mark.parametrize("spec", DEVICES.values(), ids=lambda spec: spec.name)
def test_every_device_has_a_source(spec: DeviceSpec) -> None:
    assert spec.source.startswith("NVIDIA ")
    assert 1e9 < spec.host_bytes_per_s < spec.memory_bytes_per_s < spec.flops_per_s
    assert find_device(spec.name.upper().replace(" ", "-")) is spec


def test_unknown_device() -> None:
    with pytest.raises(ProfileError, match=r"got 'V10', allowed are V100, .*; did you mean 'V100'\?$"):
        find_device("V10")


class NeedsData(nn.Module):
    """The output's shape depends on the input's values, not only on its shape."""

    one_layer = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map the samples whose first feature is no outlier; [n, 6] to [n, 6]."""
        found = torch.nonzero(x[:, 0] > -100).flatten()
        return self.linear(x[found]) if bool((found >= 0).all()) else x


def test_a_layer_that_fails_without_data_is_named_if_data_are_missing() -> None:
    class Absent(Blobs):
        def fetch(self, *_: object) -> dict[str, torch.Tensor]:
            raise FileNotFoundError("blobs: no folder is given")

    request = ProfileRequest(trace(nn.Sequential(nn.Linear(7, 4))), Absent(), [2], SGD, "of other data")
    with pytest.raises(ProfileError, match=r"layer _0 \(Linear\) .*; nor are there data to run it with: blobs: "):
        analytic_profile(request, V100)


def test_a_layer_that_needs_data_is_costed_with_data() -> None:
    model = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), NeedsData(), nn.Linear(6, 4, dtype=torch.float64))
    profile = analytic_profile(ProfileRequest(trace(model), Blobs(), [2, 4], SGD, "needs data"), V100)
    plain = nn.Sequential(*(nn.Linear(6, n, dtype=torch.float64) for n in (6, 6, 4)))
    expected = analytic_profile(ProfileRequest(trace(plain), Blobs(), [2, 4], SGD, "plain"), V100)
    assert "; _1 needs data" in profile.note
    assert "needs data" not in expected.note
    for size, rows in profile.layers.items():
        for index in (0, 2, 3):
            assert rows[index].forward_s == expected.layers[size][index].forward_s
        assert rows[1].forward_s > expected.layers[size][1].forward_s
        assert rows[1].output_bytes == expected.layers[size][1].output_bytes
