"""VGG-16 of Simonyan and Zisserman (2015), with torchvision's layers and parameter names, at any width and size."""

from torch import nn

from pipebench.zoo.convnet import ConvNet, scaled
from pipebench.zoo.options import at_least, below_one, more_than, one_of

# Output channels of the convolutions; 0: a pool, which halves the image
_CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
_HIDDEN = 4096
_IMAGE_OVER_MAP = 32
_LARGEST_MAP = 7

INITIALISATIONS = ("torchvision", "kaiming")


class VGG(ConvNet):
    """VGG-16."""


def vgg16(
    width: float = 1.0,
    batch_norm: bool = False,
    dropout: float = 0.5,
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 224,
    init: str = "torchvision",
) -> VGG:
    """Build VGG-16; with the default options it is torchvision's `vgg16`, or `vgg16_bn` with `batch_norm`.

    The classifier reads a map of 7x7 from 224 pixels on, as torchvision's, and of smaller images the map that the
    convolutions leave: a 1x1 map enlarged to 7x7 would add parameters, but no information.

    Args:
        width: multiplies the numbers of hidden channels and features; each stays at least 1.
        batch_norm: whether BatchNorm follows every convolution.
        dropout: probability of dropping a feature of the two hidden linear layers, below 1.
        num_classes: number of logits, at least 1.
        in_channels: channels of the images, at least 1.
        image_size: height and width of the images in pixels, at least 32.
        init: `torchvision` (Kaiming normal for convolutions, N(0, 0.01) for linear layers) or `kaiming` (Kaiming normal
            for both, since narrow networks don't begin to learn from N(0, 0.01)).
    """
    one_of(INITIALISATIONS, "vgg16", init=init)
    at_least(_IMAGE_OVER_MAP, "vgg16", "five pools halve", image_size=image_size)
    more_than(0, "vgg16", width=width)
    below_one("vgg16", dropout=dropout)
    at_least(1, "vgg16", num_classes=num_classes, in_channels=in_channels)
    map_size = min(_LARGEST_MAP, image_size // _IMAGE_OVER_MAP)
    features = _features(width, batch_norm, in_channels)
    classifier = _classifier(scaled(512, width) * map_size**2, scaled(_HIDDEN, width), dropout, num_classes)
    model = VGG(features, nn.AdaptiveAvgPool2d((map_size, map_size)), classifier)
    _initialise(model, init)
    return model


def _features(width: float, batch_norm: bool, in_channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    previous = in_channels
    for channels in _CHANNELS:
        if channels == 0:
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
            continue
        num_channels = scaled(channels, width)
        layers.append(nn.Conv2d(previous, num_channels, kernel_size=3, padding=1))
        if batch_norm:
            layers.append(nn.BatchNorm2d(num_channels))
        layers.append(nn.ReLU(inplace=True))
        previous = num_channels
    return nn.Sequential(*layers)


def _classifier(num_features: int, num_hidden: int, dropout: float, num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_features, num_hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(num_hidden, num_hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(num_hidden, num_classes),
    )


def _initialise(model: nn.Module, init: str) -> None:
    for module in model.modules():  # BatchNorm stays as its constructor makes it
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear) and init == "kaiming":
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
