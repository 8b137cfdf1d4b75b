"""VGG-16 against torchvision's."""

import pytest
import torch
import torchvision
from torch import fx

from pipebench import zoo
from pipebench.zoo.synthetic import synthetic
from pipebench.zoo.vgg import vgg16
from tests.zoo.cuts import check_every_cut, num_parameters


@pytest.mark.parametrize("batch_norm", [False, True])
def test_state_dict_has_torchvisions_keys_and_shapes(batch_norm: bool) -> None:
    theirs = torchvision.models.vgg16_bn if batch_norm else torchvision.models.vgg16
    with torch.device("meta"):
        ours, reference = vgg16(batch_norm=batch_norm), theirs(weights=None)
    shapes = {name: tuple(value.shape) for name, value in ours.state_dict().items()}
    assert shapes == {name: tuple(value.shape) for name, value in reference.state_dict().items()}
    assert [str(module) for module in ours.features] == [str(module) for module in reference.features]


def test_copied_weights_give_torchvisions_outputs() -> None:
    with torch.device("meta"):
        ours, reference = vgg16(batch_norm=True), torchvision.models.vgg16_bn(weights=None)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.zeros(value.shape) for name, value in ours.state_dict().items()}
    for name, value in weights.items():
        scale = (2 / max(1, value[0].numel() if value.dim() else 1)) ** 0.5
        value.normal_(0, scale, generator=generator) if "running_var" not in name else value.fill_(1)
    ours.load_state_dict(weights, assign=True)
    reference.load_state_dict(weights, assign=True)
    x = torch.rand(1, 3, 224, 224, generator=generator)
    with torch.no_grad():
        logits = ours.eval()(x)
        assert logits.isfinite().all()
        assert logits.std() > 0
        assert torch.equal(logits, reference.eval()(x))


def test_parameters_of_the_full_network() -> None:
    with torch.device("meta"):
        model = vgg16()
    assert num_parameters(model) == 138_357_544
    assert all(parameter.is_meta for parameter in model.parameters())


def test_narrow_network_for_small_images() -> None:
    model = vgg16(width=0.125, batch_norm=True, num_classes=10, in_channels=1, image_size=32)
    convolutions = [(1, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32), (32, 32), (32, 64)] + [(64, 64)] * 5
    linear = [(64, 512), (512, 512), (512, 10)]
    expected = sum(9 * i * o + o + 2 * o for i, o in convolutions) + sum(i * o + o for i, o in linear)
    assert num_parameters(model) == expected
    assert round(expected / 1e6, 2) == 0.53
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(("image_size", "map_size"), [(32, 1), (64, 2), (223, 6), (224, 7), (256, 7), (299, 7)])
def test_map_the_classifier_reads(image_size: int, map_size: int) -> None:
    with torch.device("meta"):
        model = vgg16(width=0.125, image_size=image_size)
        assert model(torch.empty(1, 3, image_size, image_size)).shape == (1, 1000)
    assert model.avgpool.output_size == (map_size, map_size)


def test_initialisation() -> None:
    torch.manual_seed(0)
    make = zoo.MODELS["vgg16"].make
    plain, kaiming = make(width=0.25, image_size=32), make(width=0.25, image_size=32, init="kaiming")
    assert plain.classifier[3].weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert kaiming.classifier[3].weight.std().item() == pytest.approx((2 / 1024) ** 0.5, rel=0.02)
    assert kaiming.features[2].weight.std().item() == pytest.approx((2 / (9 * 16)) ** 0.5, rel=0.1)
    assert not kaiming.classifier[3].bias.any()


def test_traceable_and_registered() -> None:
    model = zoo.MODELS["vgg16"].make(width=0.125, image_size=32)
    names = [node.name for node in fx.symbolic_trace(model).graph.nodes]
    assert {"features_0", "avgpool", "flatten", "classifier_6"} <= set(names)


def test_every_cut_computes_what_the_whole_does() -> None:
    torch.manual_seed(0)
    plain, normed = (
        vgg16(1 / 32, batch_norm, dropout=0, num_classes=4, in_channels=1, image_size=32, init="kaiming")
        for batch_norm in (False, True)
    )
    dataset = synthetic(shape=(1, 32, 32), num_classes=4)
    assert check_every_cut(normed, dataset, 3, apart=5) == 52
    assert check_every_cut(normed, dataset, 3, every=26) == 2
    assert check_every_cut(plain, dataset, 3, apart=5) == 39
    assert check_every_cut(plain, dataset, 3, num_random=2) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"init": "zeros"},
        {"image_size": 31},
        {"width": 0.0},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"num_classes": 0},
        {"in_channels": 0},
    ],
)
def test_options_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .* allowed"):
        zoo.MODELS["vgg16"].make(**options)
