"""Inception-v3 of Szegedy et al. (2016), with torchvision's layers and parameter names, at any width and image size."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pipebench.zoo.options import at_least, below_one

_SMALLEST_IMAGE = 75  # leaves a map of 1x1 before the average pool
_STEPS = 16  # divides all numbers of channels
_AUXILIARY_KERNEL = 5
# Standard deviations of initial weights. Differs: torchvision sets 0.01 on the block around the auxiliary head's second
# convolution, where it has no effect, so that the convolution begins with 0.1 there.
_STD, _AUXILIARY_CONVOLUTION_STD, _AUXILIARY_LINEAR_STD = 0.1, 0.01, 0.001
_BEFORE_HEAD = (
    *("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "maxpool1", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "maxpool2"),
    *("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"),
)
_AFTER_HEAD = ("Mixed_7a", "Mixed_7b", "Mixed_7c", "avgpool", "dropout")


class AuxiliaryHead(nn.Module):
    """The auxiliary classifier in the middle of the network; x: [samples, channels, map_size, map_size].

    Differs: for maps smaller than the 17x17 of 299-pixel images, the pool's and the second convolution's kernels are
    smaller, too.
    """

    def __init__(self, convolution: Any, map_size: int, width: float, num_classes: int) -> None:
        super().__init__()
        self.pool_size = min(_AUXILIARY_KERNEL, map_size)
        pooled = (map_size - self.pool_size) // 3 + 1
        self.conv0 = convolution(768, 128, kernel_size=1)
        self.conv1 = convolution(128, 768, kernel_size=min(_AUXILIARY_KERNEL, pooled))
        self.fc = nn.Linear(round(768 * width), num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the auxiliary logits: [samples, classes] float32."""
        x = nn.functional.avg_pool2d(x, kernel_size=self.pool_size, stride=3)
        x = self.conv1(self.conv0(x))
        x = torch.flatten(nn.functional.adaptive_avg_pool2d(x, (1, 1)), 1)
        return self.fc(x)  # type: ignore[no-any-return]


class InceptionV3(nn.Module):
    """Inception-v3; x: [samples, channels, height, width] float32.

    Differs: torchvision's model leaves out the auxiliary head in evaluation. Here it is always computed, so that the
    outputs, and the traced graph, don't depend on the mode.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, [samples, classes] float32, and with an auxiliary head also the auxiliary logits."""
        for name in _BEFORE_HEAD:
            x = self.get_submodule(name)(x)
        auxiliary = self.AuxLogits(x) if "AuxLogits" in self._modules else None  # type: ignore[operator]
        for name in _AFTER_HEAD:
            x = self.get_submodule(name)(x)
        logits: torch.Tensor = self.get_submodule("fc")(torch.flatten(x, 1))
        return logits if auxiliary is None else (logits, auxiliary)


def inception_v3(
    width: float = 1.0,
    aux_logits: bool = True,
    dropout: float = 0.5,
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 299,
) -> InceptionV3:
    """Build Inception-v3; with the default options it is torchvision's, but for one layer's initial weights.

    Args:
        width: multiplies the numbers of hidden channels; a multiple of 1/16, so that these stay whole.
        aux_logits: whether there is the auxiliary head; its loss times 0.4 is part of all losses, `eval_loss` included.
        dropout: probability of dropping a feature before the last linear layer, below 1.
        num_classes: number of logits, at least 1.
        in_channels: channels of the images, at least 1.
        image_size: height and width of the images in pixels, at least 75; only the auxiliary head depends on it.
    """
    if width <= 0 or not float(width * _STEPS).is_integer():
        raise ValueError(f"inception_v3: width is {width}, allowed is a multiple of 1/{_STEPS} above 0")
    below_one("inception_v3", dropout=dropout)
    at_least(1, "inception_v3", num_classes=num_classes, in_channels=in_channels)
    at_least(_SMALLEST_IMAGE, "inception_v3", "it is halved five times", image_size=image_size)
    parts = _parts(width, dropout, num_classes, in_channels, _map_size(image_size) if aux_logits else None)
    model = InceptionV3(parts)
    _initialise(model)
    return model


def _parts(
    width: float, dropout: float, num_classes: int, in_channels: int, auxiliary_map: int | None
) -> dict[str, nn.Module]:
    """Return the network's modules by name, in torchvision's order.

    `auxiliary_map` is the height and width of the map that the auxiliary head reads; None: there is no such head.
    """
    from torchvision.models import Inception3, inception  # here, since it takes a second

    def convolution(inputs: int, outputs: int, **options: Any) -> nn.Module:
        made: nn.Module = inception.BasicConv2d(max(1, round(inputs * width)), round(outputs * width), **options)
        return made

    names = "ABCDE"
    mixed = [partial(getattr(inception, f"Inception{name}"), conv_block=convolution) for name in names]
    blocks = [convolution, *mixed, inception.InceptionAux]
    theirs = Inception3(num_classes, False, inception_blocks=blocks, init_weights=False, dropout=dropout)
    parts: dict[str, nn.Module] = {}
    for name, module in theirs.named_children():
        if name == "Mixed_7a" and auxiliary_map is not None:
            parts["AuxLogits"] = AuxiliaryHead(convolution, auxiliary_map, width, num_classes)
        parts[name] = module
    first = parts["Conv2d_1a_3x3"]
    first.conv = nn.Conv2d(in_channels, round(32 * width), kernel_size=3, stride=2, bias=False)
    parts["fc"] = nn.Linear(round(2048 * width), num_classes)
    return parts


def _map_size(image_size: int) -> int:
    """Return the height and width of the map that the auxiliary head reads, in pixels."""
    size = (image_size - 3) // 2 + 1  # Conv2d_1a
    size = (size - 2 - 3) // 2 + 1  # Conv2d_2a, maxpool1
    size = (size - 2 - 3) // 2 + 1  # Conv2d_4a, maxpool2
    return (size - 3) // 2 + 1  # Mixed_6a


def _initialise(model: InceptionV3) -> None:
    """Draw weights from truncated normal distributions."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            std = _STD
            if name == "AuxLogits.conv1.conv":
                std = _AUXILIARY_CONVOLUTION_STD
            elif name == "AuxLogits.fc":
                std = _AUXILIARY_LINEAR_STD
            nn.init.trunc_normal_(module.weight, std=std, a=-2, b=2)
