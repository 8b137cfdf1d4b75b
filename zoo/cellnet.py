"""A convolutional network of residual cells, each of which can be left out: a small search space of architectures."""

from collections import OrderedDict

import torch
from torch import nn

from pipebench.zoo.options import at_least

_KERNELS = (3, 5, 3, 7)  # of the cells of a group, in turn


class Cell(nn.Module):
    """A residual cell: x + f(x), where f is a depthwise convolution (`look`), then a pointwise one (`mix`).

    If it is left out, x takes the place of its output. f is 0 at first, so a cell that is put in changes nothing before
    it is trained.
    """

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.mix = nn.Conv2d(channels, channels, 1, bias=False)
        self.scale = nn.BatchNorm2d(channels)
        nn.init.zeros_(self.scale.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, channels, height, width] to the same shape."""
        y: torch.Tensor = self.scale(self.mix(self.relu(self.norm(self.look(x)))))
        return x + y


class CellNet(nn.Module):
    """A stem, groups of cells between which the image is halved, and a linear classifier."""

    def __init__(self, width: int, groups: int, cells: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            OrderedDict(conv=nn.Conv2d(in_channels, width, 3, stride=2, padding=1), norm=nn.BatchNorm2d(width))
        )
        self.groups = nn.ModuleList()
        for group in range(groups):
            channels = width << group
            parts = [(f"cell{i}", Cell(channels, _KERNELS[i % len(_KERNELS)])) for i in range(cells)]
            self.groups.append(nn.Sequential(OrderedDict(parts)))
        self.halve = nn.ModuleList(
            nn.Conv2d(width << group, width << group + 1, 3, stride=2, padding=1) for group in range(groups - 1)
        )
        self.relu = nn.ReLU()
        self.classifier = nn.Linear(width << groups - 1, num_classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return [samples, num_classes] logits of [samples, in_channels, height, width] images."""
        x = self.relu(self.stem(image))
        for index, group in enumerate(self.groups):
            x = group(x)
            if index < len(self.halve):
                x = self.relu(self.halve[index](x))
        logits: torch.Tensor = self.classifier(x.mean((2, 3)))
        return logits


def cellnet(width: int = 16, groups: int = 2, cells: int = 4, num_classes: int = 10, in_channels: int = 1) -> CellNet:
    """Build the network with all cells, which are called `groups.0.cell0` to `groups.G.cellC`.

    Args:
        width: channels of the first group; every other group has twice as many as the one before.
        groups: at least 1.
        cells: per group, at least 1; their kernels are 3, 5, 3 and 7 pixels wide, in turn.
        num_classes: at least 1.
        in_channels: of the images, at least 1.
    """
    at_least(1, "cellnet", width=width, groups=groups, cells=cells, num_classes=num_classes, in_channels=in_channels)
    return CellNet(width, groups, cells, num_classes, in_channels)
