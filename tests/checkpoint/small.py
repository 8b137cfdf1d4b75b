"""The model of runs with damaged files, in a module that imports no test, since a run records all that it imports."""

import os
from typing import Any

import torch
from torch import nn

CHANGE = "TEST_CHANGE"  # the environment variable that selects a change of the model's code


class Small(nn.Module):
    """A convolution with running statistics and a linear layer: [n, 1, 28, 28] to [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 5, stride=4), nn.BatchNorm2d(4)
        self.flat, self.head = nn.Flatten(), nn.Linear(4 * 6 * 6, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.flat(torch.relu(self.norm(self.conv(image)))))


def small() -> nn.Module:
    """Return the model, or the one with changed code that the environment selects."""
    model: Any = Small()
    change = os.environ.get(CHANGE, "")
    if change == "renamed":
        model.head.register_buffer("extra", torch.zeros(3))
    if change == "wider":
        model.norm = nn.BatchNorm2d(4, affine=False)
    return model
