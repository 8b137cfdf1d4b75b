"""ResNet-50 of He et al. (2016), with torchvision's layers and parameter names, at any width and image size."""

import torch
from torch import nn

from pipebench.zoo.convnet import scaled
from pipebench.zoo.options import at_least, more_than, one_of

_BLOCKS = (3, 4, 6, 3)
_CHANNELS = (64, 128, 256, 512)  # of the 3x3 convolutions in each group of blocks
_EXPANSION = 4  # a block's output channels over those of its 3x3 convolution

STEMS = ("imagenet", "cifar")


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions; the first two have `channels` output channels.

    Differs: the stride is that of the 3x3 convolution, as in torchvision, not of the first 1x1 one, as in the paper.
    """

    def __init__(self, in_channels: int, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            projection = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, in_channels, height, width] to [samples, out_channels, height / stride, width / stride].

        Sides are rounded up.
        """
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A stem, four groups of blocks, one linear layer; x: [samples, channels, height, width] float32."""

    def __init__(self, width: float, num_classes: int, in_channels: int, stem: str) -> None:
        super().__init__()
        first = scaled(_CHANNELS[0], width)
        small = stem == "cifar"
        kernel_size, stride, padding = (3, 1, 1) if small else (7, 2, 3)
        self.conv1 = nn.Conv2d(in_channels, first, kernel_size, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        previous = first
        for index, (blocks, channels) in enumerate(zip(_BLOCKS, _CHANNELS, strict=True)):
            num_channels = scaled(channels, width)
            group = nn.Sequential()
            for block in range(blocks):
                stride = 2 if index > 0 and block == 0 else 1
                group.append(Bottleneck(previous, num_channels, _EXPANSION * num_channels, stride))
                previous = _EXPANSION * num_channels
            self.add_module(f"layer{index + 1}", group)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(previous, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits: [samples, classes] float32."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # type: ignore[operator]
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)  # type: ignore[no-any-return]


def resnet50(
    width: float = 1.0,
    num_classes: int = 1000,
    in_channels: int = 3,
    stem: str = "imagenet",
    zero_init_residual: bool = False,
) -> ResNet:
    """Build ResNet-50; with the default options it is torchvision's `resnet50`, at any image size.

    Args:
        width: multiplies the numbers of hidden channels; each stays at least 1.
        num_classes: number of logits, at least 1.
        in_channels: channels of the images, at least 1.
        stem: `imagenet` (a 7x7 convolution of stride 2 and a max-pool: images shrink 32-fold) or `cifar` (a 3x3
            convolution of stride 1 and no pool, as is usual for images of about 32 pixels: they shrink 8-fold).
        zero_init_residual: whether blocks start as the identity: the last BatchNorm's weight is 0 (Goyal et al. 2017).
    """
    more_than(0, "resnet50", width=width)
    at_least(1, "resnet50", num_classes=num_classes, in_channels=in_channels)
    one_of(STEMS, "resnet50", stem=stem)
    model = ResNet(width, num_classes, in_channels, stem)
    for module in model.modules():  # the linear layer and BatchNorm stay as their constructors make them
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init_residual and isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
    return model
