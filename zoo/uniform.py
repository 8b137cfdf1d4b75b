"""A chain of equal linear layers, for comparing simulations with closed formulas of pipelines."""

from collections import OrderedDict

import torch
from torch import nn

from pipebench.zoo.options import at_least


class Uniform(nn.Sequential):
    """Linear layers of one width, without biases."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Map [samples, width] to [samples, width]."""
        for layer in self:
            image = layer(image)
        return image


def uniform(num_layers: int = 16, width: int = 64) -> Uniform:
    """Build the chain.

    Args:
        num_layers: at least 1.
        width: number of inputs, logits and features between layers, at least 1.
    """
    at_least(1, "uniform", num_layers=num_layers, width=width)
    layers = {f"layer{index}": nn.Linear(width, width, bias=False) for index in range(num_layers)}
    return Uniform(OrderedDict(layers))
