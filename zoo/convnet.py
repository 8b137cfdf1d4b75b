"""The common structure of VGG-16 and AlexNet, and the scaling of channels by a network's width."""

import torch
from torch import nn


class ConvNet(nn.Module):
    """Convolutions, one adaptive pool, three linear layers; x: [samples, channels, height, width] float32."""

    def __init__(self, features: nn.Sequential, avgpool: nn.AdaptiveAvgPool2d, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = avgpool
        self.classifier = classifier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits: [samples, classes] float32."""
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)  # type: ignore[no-any-return]


def scaled(count: int, width: float) -> int:
    """Return a number of channels or features multiplied by `width`, at least 1."""
    return max(1, round(count * width))
