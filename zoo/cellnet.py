"""A convolutional network of residual cells that can each be left out: a small space to search architectures in."""

from collections import OrderedDict

import torch
from torch import nn

from pipebench.zoo.options import at_least

_KERNELS = (3, 5, 3, 7)  # of the cells of a group, over and over: cells of one group differ


class Cell(nn.Module):
    """A residual cell: x + f(x), f being a depthwise convolution that looks around and a pointwise one that mixes.

    Without it, x goes on as it is, so that a network is a network with any of its cells left out. And f begins as zero:
    a cell that is put in changes nothing before it is trained.
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
        """Return [samples, channels, height, width], as it is given."""
        y: torch.Tensor = self.scale(self.mix(self.relu(self.norm(self.look(x)))))
        return x + y


class CellNet(nn.Module):
    """A stem, groups of cells with a halving of the image between them, and a linear classifier."""

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
    """Build the network, all cells in it: `groups.0.cell0` to `groups.G.cellC`.

    Args:
        width: channels of the first group; every further one has twice as many on a quarter of the pixels.
        groups: at least 1.
        cells: per group, at least 1; they look around in windows of 3, 5, 3 and 7 pixels, in turn.
        num_classes: at least 1.
        in_channels: of the images, at least 1.
    """
    at_least(1, "cellnet", width=width, groups=groups, cells=cells, num_classes=num_classes, in_channels=in_channels)
    return CellNet(width, groups, cells, num_classes, in_channels)
