"""ResNet-50 against torchvision's, and cut everywhere."""

import pytest
import torch
import torchvision
from torch import nn

from pipebench import zoo
from pipebench.zoo.resnet import ResNet, resnet50
from pipebench.zoo.synthetic import synthetic
from tests.zoo.cuts import check_every_cut

NUM_LAYERS = 175  # 53 convolutions and as many BatchNorms, 49 ReLUs, 16 sums, two pools, flatten, the linear layer


def tiny(image_size: int = 8, stem: str = "cifar") -> tuple[ResNet, zoo.Dataset]:
    torch.manual_seed(0)
    model = resnet50(width=1 / 32, num_classes=4, in_channels=1, stem=stem)
    return model, synthetic(shape=(1, image_size, image_size), num_classes=4)


def test_state_dict_has_torchvisions_keys_and_shapes() -> None:
    with torch.device("meta"):
        ours, reference = resnet50(), torchvision.models.resnet50(weights=None)
    shapes = [(name, tuple(value.shape)) for name, value in ours.state_dict().items()]
    assert shapes == [(name, tuple(value.shape)) for name, value in reference.state_dict().items()]
    assert sum(parameter.numel() for parameter in ours.parameters()) == 25_557_032


def test_same_seed_and_loaded_weights_give_torchvisions_values() -> None:
    torch.manual_seed(0)
    reference = torchvision.models.resnet50(weights=None)
    torch.manual_seed(0)
    ours = resnet50()
    for value, expected in zip(ours.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(value, expected)
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):  # the initial ones and zeros would hide a BatchNorm in the wrong place
            module.weight.data.uniform_(0.5, 1.5)
            module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
    ours.load_state_dict(reference.state_dict())
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours(x), reference(x))
        logits = ours.eval()(x)
        assert logits.std() > 0
        assert torch.equal(logits, reference.eval()(x))


def test_narrow_network_for_small_images_keeps_its_convolutions() -> None:
    model = resnet50(width=0.125, num_classes=10, in_channels=1, stem="cifar")
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 53
    assert (convolutions[0].kernel_size, convolutions[0].stride) == ((3, 3), (1, 1))
    maps: list[torch.Size] = []
    for name in ("maxpool", "layer1", "layer2", "layer3", "layer4"):
        model.get_submodule(name).register_forward_hook(lambda _m, _i, output: maps.append(output.shape[1:]))
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)
    assert [tuple(each) for each in maps] == [(8, 32, 32), (32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4)]


def test_zero_init_residual_makes_every_block_the_identity() -> None:
    torch.manual_seed(0)
    model = resnet50(width=1 / 16, zero_init_residual=True)
    block = model.get_submodule("layer1.1")
    x = torch.rand(2, 16, 5, 5)
    assert torch.equal(block(x), x)
    assert not torch.equal(resnet50(width=1 / 16).get_submodule("layer1.1")(x), x)


def test_every_cut_computes_what_the_whole_does() -> None:
    model, dataset = tiny()
    assert check_every_cut(model, dataset, 5, apart=4) == NUM_LAYERS - 1
    assert check_every_cut(model, dataset, 5, every=70) == 3
    assert check_every_cut(model, dataset, 5, num_random=2, num_stages=4) == 6


def test_cuts_of_the_full_stem() -> None:
    model, dataset = tiny(32, "imagenet")
    assert check_every_cut(model, dataset, 5, num_random=2, num_stages=12) == 22


@pytest.mark.parametrize("options", [{"width": 0.0}, {"num_classes": 0}, {"in_channels": 0}, {"stem": "mnist"}])
def test_options_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^resnet50: {next(iter(options))} is .* allowed"):
        zoo.MODELS["resnet50"].make(**options)
