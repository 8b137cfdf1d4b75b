"""AlexNet of Krizhevsky (2014), with torchvision's layers and parameter names, at any width and image size."""

from torch import nn

from pipebench.zoo.convnet import ConvNet, scaled
from pipebench.zoo.options import at_least, below_one, more_than

_LARGEST_MAP = 6
_SMALLEST_IMAGE = 63  # leaves a map of 1x1 after the last pool
_HIDDEN = 4096


class AlexNet(ConvNet):
    """AlexNet: five convolutions."""


def alexnet(
    width: float = 1.0,
    batch_norm: bool = False,
    dropout: float = 0.5,
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 224,
) -> AlexNet:
    """Build AlexNet; with the default options it is torchvision's `alexnet`.

    The classifier reads a map of 6x6 from 224 pixels on, as torchvision's, and of smaller images the map that the
    convolutions leave.

    Differs: one path of 64, 192, 384, 256 and 256 channels, as in torchvision, not the two paths of Krizhevsky et al.
    (2012), and no local response normalisation.

    Args:
        width: multiplies the numbers of hidden channels and features; each stays at least 1.
        batch_norm: whether BatchNorm follows every convolution.
        dropout: probability of dropping a feature before each of the first two linear layers, below 1.
        num_classes: number of logits, at least 1.
        in_channels: channels of the images, at least 1.
        image_size: height and width of the images in pixels, at least 63.
    """
    more_than(0, "alexnet", width=width)
    below_one("alexnet", dropout=dropout)
    at_least(1, "alexnet", num_classes=num_classes, in_channels=in_channels)
    at_least(_SMALLEST_IMAGE, "alexnet", "a stride of 4 and three pools", image_size=image_size)
    map_size = min(_LARGEST_MAP, _map_size(image_size))
    features = _features(width, batch_norm, in_channels)
    classifier = _classifier(scaled(256, width) * map_size**2, scaled(_HIDDEN, width), dropout, num_classes)
    return AlexNet(features, nn.AdaptiveAvgPool2d((map_size, map_size)), classifier)


def _map_size(image_size: int) -> int:
    """Return the height and width of the last pool's output, in pixels."""
    size = (image_size + 2 * 2 - 11) // 4 + 1  # the first convolution: padding 2, kernel 11, stride 4
    for _ in range(3):
        size = (size - 3) // 2 + 1
    return size


def _features(width: float, batch_norm: bool, in_channels: int) -> nn.Sequential:
    channels = [in_channels, *(scaled(count, width) for count in (64, 192, 384, 256, 256))]
    layers: list[nn.Module] = []
    for index, (kernel_size, stride, padding, pools) in enumerate(
        [(11, 4, 2, True), (5, 1, 2, True), (3, 1, 1, False), (3, 1, 1, False), (3, 1, 1, True)]
    ):
        layers.append(nn.Conv2d(channels[index], channels[index + 1], kernel_size, stride, padding))
        if batch_norm:
            layers.append(nn.BatchNorm2d(channels[index + 1]))
        layers.append(nn.ReLU(inplace=True))
        if pools:
            layers.append(nn.MaxPool2d(kernel_size=3, stride=2))
    return nn.Sequential(*layers)


def _classifier(num_features: int, num_hidden: int, dropout: float, num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(num_features, num_hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(num_hidden, num_hidden),
        nn.ReLU(inplace=True),
        nn.Linear(num_hidden, num_classes),
    )
