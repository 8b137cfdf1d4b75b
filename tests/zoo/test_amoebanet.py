"""AmoebaNet-D: published numbers of parameters, cells implemented a second time, shapes, every cut, modes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench import zoo
from pipebench.model.graph import trace
from pipebench.zoo.amoebanet import NORMAL, REDUCTION, AmoebaNet, Cell, Halved, amoebanet_d
from pipebench.zoo.synthetic import synthetic
from tests.evaluations import Images
from tests.zoo.cuts import check_every_cut
from tests.zoo.modes import check_mode

NORMAL_CELL = 48  # layers of one that follows two normal cells; one state less is prepared where channels agree
DATA = synthetic(shape=(1, 9, 9), num_classes=4)


def make(**options: Any) -> AmoebaNet:
    torch.manual_seed(1)
    small: dict[str, Any] = {"num_layers": 3, "num_filters": 8, "num_classes": 4, "in_channels": 1, "stem": "cifar"}
    return amoebanet_d(**(small | options))


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "millions", "gpipe"),
    [
        (18, 208, 81.5, 82),
        (18, 416, 319.0, 318),
        (18, 544, 542.7, 542),
        (36, 544, 1055.8, 1050),
        (72, 512, 1844.9, 1800),
    ],
)
def test_numbers_of_parameters_equal_gpipe_s(num_layers: int, num_filters: int, millions: float, gpipe: float) -> None:
    """From GPipe's table 1; torchgpipe's memory benchmark has one digit more."""
    with torch.device("meta"):
        model = amoebanet_d(num_layers, num_filters)
    found = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert found == pytest.approx(millions, abs=0.06)
    assert found == pytest.approx(gpipe, rel=0.03)


def relu_conv_norm(x: torch.Tensor, parts: list[Any], **options: Any) -> torch.Tensor:
    """Return x rectified, convolved and normalised by its own statistics."""
    convolution, norm = (part for part in parts if not isinstance(part, nn.ReLU))
    y = functional.conv2d(functional.relu(x), convolution.weight, **options)
    return functional.batch_norm(y, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


def one_by_seven(x: torch.Tensor, parts: Any, stride: int = 1) -> torch.Tensor:
    x = relu_conv_norm(x, parts[0:3])
    x = relu_conv_norm(x, parts[3:6], padding=(0, 3), stride=(1, stride))
    x = relu_conv_norm(x, parts[6:9], padding=(3, 0), stride=(stride, 1))
    return relu_conv_norm(x, parts[9:12])


def max_pool(x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    return functional.max_pool2d(x, 3, stride, padding=1)


def mean_pool(x: torch.Tensor) -> torch.Tensor:
    return functional.avg_pool2d(x, 3, 1, padding=1, count_include_pad=False)


def test_the_normal_cell_by_hand() -> None:
    """Written out from the authors' lists of operations and of their input states."""
    torch.manual_seed(0)
    cell = Cell(NORMAL, 12, 8, 8, halves=False, last_halved=False).double()
    last, before = torch.randn(2, 12, 6, 6).double(), torch.randn(2, 8, 6, 6).double()
    parts = {name: list(module) for name, module in cell.operations.items() if isinstance(module, nn.Sequential)}
    a, b = relu_conv_norm(last, list(cell.last)), before
    c = relu_conv_norm(b, parts["0_conv_1x1"]) + max_pool(b)
    d = b + one_by_seven(a, parts["3_conv_1x7_7x1"])
    e = relu_conv_norm(a, parts["4_conv_1x1"]) + one_by_seven(a, parts["5_conv_1x7_7x1"])
    f = max_pool(c) + c
    g = mean_pool(b) + relu_conv_norm(f, parts["9_conv_1x1"])
    torch.testing.assert_close(cell(last, before), torch.cat((a, d, e, g), 1), rtol=1e-10, atol=1e-11)


def test_the_reduction_cell_by_hand() -> None:
    torch.manual_seed(0)
    cell = Cell(REDUCTION, 12, 16, 8, halves=True, last_halved=False).double()
    last, before = torch.randn(2, 12, 6, 6).double(), torch.randn(2, 16, 6, 6).double()
    parts = {name: list(module) for name, module in cell.operations.items() if isinstance(module, nn.Sequential)}
    assert isinstance(cell.before, nn.Sequential)
    a, b = relu_conv_norm(last, list(cell.last)), relu_conv_norm(before, list(cell.before))
    three = parts["3_conv_3x3"]
    narrow = relu_conv_norm(relu_conv_norm(b, three[0:3]), three[3:6], padding=1, stride=2)
    c = functional.max_pool2d(a, 2) + max_pool(a, 2)
    d = c + relu_conv_norm(narrow, three[6:9])
    e = one_by_seven(c, parts["4_conv_1x7_7x1"]) + max_pool(c)
    f = d + functional.max_pool2d(b, 2)
    g = mean_pool(c) + relu_conv_norm(d, parts["9_conv_1x1"])
    torch.testing.assert_close(cell(last, before), torch.cat((e, f, g), 1), rtol=1e-10, atol=1e-11)


def test_halving_reads_two_grids_one_pixel_apart() -> None:
    halved = Halved(1, 2).double().eval()
    for convolution in (halved.even, halved.odd):
        nn.init.ones_(convolution.weight)
    x = torch.arange(36, dtype=torch.float64).view(1, 1, 6, 6)
    found = halved(x) * (1 + halved.norm.eps) ** 0.5
    torch.testing.assert_close(found, torch.stack((x[0, 0, ::2, ::2], x[0, 0, 1::2, 1::2])).unsqueeze(0))
    assert halved(torch.randn(1, 1, 7, 7).double()).shape == (1, 2, 4, 4)


@pytest.mark.parametrize(("side", "stem", "last"), [(224, "imagenet", 7), (32, "imagenet", 1), (28, "cifar", 7)])
def test_sides_and_channels(side: int, stem: str, last: int) -> None:
    sizes: list[torch.Size] = []
    with torch.device("meta"):
        model = amoebanet_d(6, 16, in_channels=1, stem=stem)
        for cell in model.cells:
            cell.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.shape))
        assert model(torch.empty(2, 1, side, side)).shape == (2, 1000)
    assert sizes[-1] == (2, 16 * 4 * 4, last, last)  # two doublings after the first normal cells, four states joined
    assert len(sizes) == 6 + 2 + (2 if stem == "imagenet" else 0)


def test_a_normal_cell_has_48_layers_and_two_values_cross_between_cells() -> None:
    graph = trace(make(num_layers=12))
    names = [layer.name for layer in graph.layers]
    inside = [name for name in names if name.startswith("cells_2_")]
    assert len(inside) == NORMAL_CELL - 6  # sums and the joining are functions
    outputs = [layer.index for layer in graph.layers if layer.kind == "cat"]
    third, fourth = outputs[2], outputs[3]
    assert fourth - third == NORMAL_CELL
    readers = {layer.name.split("_")[1] for layer in graph.layers if third in layer.reads}
    assert readers == {"3", "4"}


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = amoebanet_d(3, 128, num_classes=10)
    cell = model.cells[0]
    assert isinstance(cell, Cell)
    assert isinstance(cell.last[1], nn.Conv2d)
    assert cell.last[1].weight.std().item() == pytest.approx((2 / 32) ** 0.5, rel=0.05)


@pytest.mark.slow
def test_every_cut_computes_the_whole() -> None:
    num_layers = len(trace(make()).layers)
    assert check_every_cut(make(), DATA, 3, apart=4) == num_layers - 1
    assert check_every_cut(make(), DATA, 3, num_random=2, num_stages=5) == 8


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["single", "model", "pipedream", "pipedream-vertical-sync"])
def test_modes_train_as_their_plain_loops_do(mode: str) -> None:
    """Only modes whose minibatches stay whole: with microbatches, batch statistics are others."""
    check_mode(make(in_channels=3), Images(9, num_train=16), mode, num_minibatches=4)


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 0},
        {"num_layers": 20},
        {"num_filters": 0},
        {"num_filters": 100},
        {"num_classes": 0},
        {"in_channels": 0},
        {"stem": "none"},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^amoebanet_d: {next(iter(options))} is .* allowed"):
        zoo.MODELS["amoebanet_d"].make(**options)
