"""Inception-v3 against torchvision's, and cut everywhere."""

import pytest
import torch
import torchvision

from pipebench import zoo
from pipebench.zoo.inception import inception_v3
from pipebench.zoo.synthetic import synthetic
from tests.zoo.cuts import check_every_cut


@pytest.mark.parametrize(("aux_logits", "num_parameters"), [(True, 27_161_264), (False, 23_834_568)])
def test_state_dict_has_torchvisions_keys_and_shapes(aux_logits: bool, num_parameters: int) -> None:
    with torch.device("meta"):
        ours = inception_v3(aux_logits=aux_logits)
        reference = torchvision.models.Inception3(aux_logits=aux_logits, init_weights=False)
    shapes = [(name, tuple(value.shape)) for name, value in ours.state_dict().items()]
    assert shapes == [(name, tuple(value.shape)) for name, value in reference.state_dict().items()]
    assert sum(parameter.numel() for parameter in ours.parameters()) == num_parameters


def test_loaded_weights_give_torchvisions_outputs() -> None:
    """Both heads while training, and the main one in evaluation, where torchvision's has no other."""
    torch.manual_seed(0)
    reference = torchvision.models.Inception3(init_weights=False, dropout=0)
    with torch.device("meta"):
        ours = inception_v3(dropout=0)
    ours.load_state_dict({name: value.clone() for name, value in reference.state_dict().items()}, assign=True)
    x = torch.rand(2, 3, 299, 299)
    with torch.no_grad():
        for mine, expected in zip(ours(x), reference(x), strict=True):
            assert mine.std() > 0
            assert torch.equal(mine, expected)
        logits, auxiliary = ours.eval()(x)  # BatchNorm's statistics have moved alike
        assert torch.equal(logits, reference.eval()(x))
        assert auxiliary.shape == (2, 1000)


def test_initial_weights_have_torchvision_s_deviations() -> None:
    """But for the auxiliary head's second convolution, for which torchvision's own 0.01 has no effect."""
    torch.manual_seed(0)
    model = inception_v3(width=0.25)
    reference = torchvision.models.Inception3(init_weights=True)
    for name in [name for name, theirs in reference.named_parameters() if theirs.dim() > 1]:
        std = 0.01 if name == "AuxLogits.conv1.conv.weight" else reference.get_parameter(name).std().item()
        assert model.get_parameter(name).std().item() == pytest.approx(std, rel=0.1), name
    torch.manual_seed(0)
    again = inception_v3(width=0.25).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("image_size", "map_size"), [(75, 3), (139, 7), (298, 16), (299, 17), (331, 19)])
def test_auxiliary_head_reads_a_map_of_this_size(image_size: int, map_size: int) -> None:
    with torch.device("meta"):
        model = inception_v3(width=1 / 16, num_classes=5, in_channels=1, image_size=image_size)
        seen: list[torch.Size] = []
        head = model.get_submodule("AuxLogits")
        head.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].shape))
        logits, auxiliary = model(torch.empty(2, 1, image_size, image_size))
    assert seen == [(2, 48, map_size, map_size)]
    assert logits.shape == auxiliary.shape == (2, 5)


def test_without_auxiliary_logits_the_output_is_a_tensor() -> None:
    with torch.device("meta"):
        model = inception_v3(width=1 / 16, aux_logits=False)
        assert model(torch.empty(2, 3, 299, 299)).shape == (2, 1000)


@pytest.mark.slow
def test_every_cut_computes_what_the_whole_does() -> None:
    """The head's logits cross to the last stage, wherever they are made; five branches cross at once."""
    torch.manual_seed(0)
    model = inception_v3(width=1 / 16, dropout=0, num_classes=4, in_channels=1, image_size=75)
    dataset = synthetic(shape=(1, 75, 75), num_classes=4)
    assert check_every_cut(model, dataset, 5, apart=4) == 323
    assert check_every_cut(model, dataset, 5, every=108) == 3


@pytest.mark.parametrize(
    "options",
    [{"width": 0.0}, {"width": 0.1}, {"dropout": -0.1}, {"num_classes": 0}, {"in_channels": 0}, {"image_size": 74}],
)
def test_options_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^inception_v3: {next(iter(options))} is .* allowed"):
        zoo.MODELS["inception_v3"].make(**options)
