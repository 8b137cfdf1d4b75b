"""AlexNet against torchvision's, and cut everywhere."""

import pytest
import torch
import torchvision
from torch import nn

from pipebench import zoo
from pipebench.zoo.alexnet import alexnet
from pipebench.zoo.synthetic import synthetic
from tests.zoo.cuts import check_every_cut


def test_state_dict_and_layers_equal_torchvision_s() -> None:
    with torch.device("meta"):
        ours, reference = alexnet(), torchvision.models.alexnet(weights=None)
    shapes = [(name, tuple(value.shape)) for name, value in ours.state_dict().items()]
    assert shapes == [(name, tuple(value.shape)) for name, value in reference.state_dict().items()]
    assert str(ours) == str(reference)
    assert sum(parameter.numel() for parameter in ours.parameters()) == 61_100_840


def test_loaded_weights_give_torchvisions_outputs() -> None:
    torch.manual_seed(0)
    reference = torchvision.models.alexnet(weights=None)
    with torch.device("meta"):
        ours = alexnet()
    ours.load_state_dict(reference.state_dict(), assign=True)
    x = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        logits = ours.eval()(x)
        assert logits.std() > 0
        assert torch.equal(logits, reference.eval()(x))


@pytest.mark.parametrize(
    ("image_size", "map_size"), [(63, 1), (64, 1), (95, 2), (195, 5), (223, 6), (227, 6), (299, 6)]
)
def test_map_the_classifier_reads(image_size: int, map_size: int) -> None:
    with torch.device("meta"):
        model = alexnet(width=0.125, image_size=image_size)
        left = model.features(torch.empty(1, 3, image_size, image_size)).shape[-1]
        assert model(torch.empty(1, 3, image_size, image_size)).shape == (1, 1000)
    assert model.avgpool.output_size == (map_size, map_size)
    assert min(6, left) == map_size


def test_batch_norm_follows_every_convolution() -> None:
    model = alexnet(width=0.25, batch_norm=True)
    modules = list(model.features)
    for index, module in enumerate(modules):
        if isinstance(module, nn.Conv2d):
            following = modules[index + 1]
            assert isinstance(following, nn.BatchNorm2d)
            assert following.num_features == module.out_channels
    assert sum(isinstance(module, nn.Conv2d) for module in modules) == 5


@pytest.mark.parametrize("batch_norm", [False, True])
def test_every_cut_computes_what_the_whole_does(batch_norm: bool) -> None:
    torch.manual_seed(0)
    model = alexnet(1 / 32, batch_norm, dropout=0, num_classes=4, in_channels=1, image_size=63)
    dataset = synthetic(shape=(1, 63, 63), num_classes=4)
    assert check_every_cut(model, dataset, 3) == (26 if batch_norm else 21)
    assert check_every_cut(model, dataset, 3, num_random=5) == 10


@pytest.mark.parametrize(
    "options", [{"width": 0.0}, {"dropout": 1.0}, {"num_classes": 0}, {"in_channels": 0}, {"image_size": 62}]
)
def test_options_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^alexnet: {next(iter(options))} is .* allowed"):
        zoo.MODELS["alexnet"].make(**options)
