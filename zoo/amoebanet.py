"""AmoebaNet-D, an image classifier whose cells were found by evolution, of any number of layers and filters.

Real et al. (2019), "Regularized evolution for image classifier architecture search", and Huang et al. (2019), "GPipe",
which trains AmoebaNet-D (L, D) with L normal cells and D filters. Every operator is a layer: 48 in most normal cells. A
cell reads the outputs of the two cells before it, so two values cross every cut between cells.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from pipebench.zoo.options import at_least, one_of


@dataclass(frozen=True)
class Genotype:
    """The structure of a cell, as found by evolution.

    States 0 and 1 are the outputs of the last cell and of the one before it, brought to the cell's shape. Every pair
    adds a state: the sum of an operation on one state and an operation on another.
    """

    pairs: tuple[tuple[tuple[int, str], tuple[int, str]], ...]  # two (state, operation) each
    joined: tuple[int, ...]  # the states that the cell's output concatenates


# From the authors' code (tensorflow/tpu, models/official/amoeba_net), to which GPipe's numbers of parameters belong.
# Differs from the paper's figure: there the normal cell joins its states 4, 5 and 6.
NORMAL = Genotype(
    (
        ((1, "conv_1x1"), (1, "max_pool_3x3")),
        ((1, "none"), (0, "conv_1x7_7x1")),
        ((0, "conv_1x1"), (0, "conv_1x7_7x1")),
        ((2, "max_pool_3x3"), (2, "none")),
        ((1, "avg_pool_3x3"), (5, "conv_1x1")),
    ),
    (0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        ((0, "max_pool_2x2"), (0, "max_pool_3x3")),
        ((2, "none"), (1, "conv_3x3")),
        ((2, "conv_1x7_7x1"), (2, "max_pool_3x3")),
        ((3, "none"), (1, "max_pool_2x2")),
        ((2, "avg_pool_3x3"), (3, "conv_1x1")),
    ),
    (4, 5, 6),
)
_NONE = "none"
# Number of cells before the first normal cell, each of which halves the image.
STEMS: Mapping[str, int] = {"imagenet": 2, "cifar": 0}
_NUM_GROUPS = 3  # of normal cells, a reduction cell between them


def _relu_conv_norm(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> list[nn.Module]:
    padding = (kernel[0] // 2, kernel[1] // 2)
    return [nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs)]


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(*_relu_conv_norm(channels, channels, stride=(stride, stride)))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        *_relu_conv_norm(channels, narrow),
        *_relu_conv_norm(narrow, narrow, (3, 3), (stride, stride)),
        *_relu_conv_norm(narrow, channels),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        *_relu_conv_norm(channels, narrow),
        *_relu_conv_norm(narrow, narrow, (1, 7), (1, stride)),
        *_relu_conv_norm(narrow, narrow, (7, 1), (stride, 1)),
        *_relu_conv_norm(narrow, channels),
    )


# Make a module from channels and stride. All round up if they halve an odd side.
_OPERATIONS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "conv_1x1": _conv_1x1,
    "conv_3x3": _conv_3x3,
    "conv_1x7_7x1": _conv_1x7_7x1,
    "max_pool_2x2": lambda channels, stride: nn.MaxPool2d(2, stride, ceil_mode=True),
    "max_pool_3x3": lambda channels, stride: nn.MaxPool2d(3, stride, padding=1),
    "avg_pool_3x3": lambda channels, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
}


class Halved(nn.Module):
    """Halves an image's side without dropping pixels: two grids, a pixel apart, get half of the filters each."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, inputs, side, side] to [samples, outputs, half, half]."""
        x = self.relu(x)
        shifted = functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        y: torch.Tensor = self.norm(torch.cat((self.even(x), self.odd(shifted)), 1))
        return y


class Cell(nn.Module):
    """A cell.

    Args:
        genotype: its structure.
        last: channels of the output of the cell before.
        before: channels of the output of the cell before that.
        channels: of each of its states.
        halves: whether it halves the image, by its operations on states 0 and 1.
        last_halved: whether the cell before halves the image.
    """

    def __init__(
        self, genotype: Genotype, last: int, before: int, channels: int, *, halves: bool, last_halved: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.last = nn.Sequential(*_relu_conv_norm(last, channels))
        self.before: nn.Module | None = None
        if last_halved:
            self.before = Halved(before, channels)
        elif before != channels:
            self.before = nn.Sequential(*_relu_conv_norm(before, channels))
        self.operations = nn.ModuleDict()
        for number, (state, operation) in enumerate(part for pair in genotype.pairs for part in pair):
            if operation != _NONE:
                stride = 2 if halves and state < 2 else 1
                self.operations[f"{number}_{operation}"] = _OPERATIONS[operation](channels, stride)

    def forward(self, last: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return [samples, joined states * channels, side, side], given the outputs of the two cells before."""
        states = [self.last(last), before if self.before is None else self.before(before)]
        for number, pair in enumerate(self.genotype.pairs):
            first, second = (
                self._operated(2 * number + i, states[state], name) for i, (state, name) in enumerate(pair)
            )
            states.append(first + second)
        return torch.cat([states[state] for state in self.genotype.joined], 1)

    def _operated(self, number: int, state: torch.Tensor, operation: str) -> torch.Tensor:
        done: torch.Tensor = state if operation == _NONE else self.operations[f"{number}_{operation}"](state)
        return done


class AmoebaNet(nn.Module):
    """A stem, cells, an average pool and a linear classifier; see `amoebanet_d`. `channels`: of the last cell."""

    def __init__(self, stem: Sequence[nn.Module], cells: Sequence[Cell], channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*stem)
        self.cells = nn.ModuleList(cells)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Map images, [samples, channels, side, side], to logits, [samples, classes]."""
        before = last = self.stem(image)
        for cell in self.cells:
            before, last = last, cell(last, before)
        logits: torch.Tensor = self.classifier(self.flatten(self.pool(last)))
        return logits


def amoebanet_d(
    num_layers: int = 18, num_filters: int = 256, num_classes: int = 1000, in_channels: int = 3, stem: str = "imagenet"
) -> AmoebaNet:
    """Build AmoebaNet-D (num_layers, num_filters), without auxiliary logits.

    Args:
        num_layers: GPipe's L: normal cells, a multiple of 3. vPipe's model of 2,190 layers has about 42.
        num_filters: GPipe's D: channels of a state in the first normal cells, a multiple of 8; both reduction cells
            after these double them.
        num_classes: number of logits, at least 1.
        in_channels: channels of the images, at least 1.
        stem: `imagenet` (a convolution and two reduction cells leave an eighth of the side) or `cifar`, for small
            images (a convolution leaves the whole side).
    """
    one_of(STEMS, "amoebanet_d", stem=stem)
    for option, value, multiple in (("num_layers", num_layers, _NUM_GROUPS), ("num_filters", num_filters, 8)):
        if value < multiple or value % multiple:
            raise ValueError(
                f"amoebanet_d: {option} is {value}, allowed is a multiple of {multiple}, {multiple} or more"
            )
    at_least(1, "amoebanet_d", num_classes=num_classes, in_channels=in_channels)
    halvings = STEMS[stem]
    channels = num_filters // 2**halvings
    first = nn.Conv2d(in_channels, channels, 3, 2 if halvings else 1, padding=1, bias=False)
    halving = [True] * halvings
    for group in range(_NUM_GROUPS):
        halving += [*([True] if group else []), *[False] * (num_layers // _NUM_GROUPS)]
    cells, width = _cells(halving, channels)
    model = AmoebaNet([first, nn.BatchNorm2d(channels)], cells, width, num_classes)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def _cells(halving: Sequence[bool], channels: int) -> tuple[list[Cell], int]:
    """Return the cells, and the channels of the last one's output.

    Args:
        halving: for every cell, whether it halves the image, and then doubles the channels of a state.
        channels: of the stem's output.
    """
    cells: list[Cell] = []
    before = last = channels
    last_halved = False
    for halves in halving:
        channels *= 1 + halves
        genotype = REDUCTION if halves else NORMAL
        cells.append(Cell(genotype, last, before, channels, halves=halves, last_halved=last_halved))
        before, last, last_halved = last, channels * len(genotype.joined), halves
    return cells, last
