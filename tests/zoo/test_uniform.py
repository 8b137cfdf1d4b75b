import pytest
import torch
from torch import fx

from pipebench import zoo
from pipebench.zoo.uniform import uniform


def test_the_model_equals_the_product_of_its_layers() -> None:
    torch.manual_seed(0)
    model = uniform(num_layers=3, width=5)
    image = torch.randn(2, 5)
    expected = image
    for parameter in model.parameters():
        expected = expected @ parameter.T
    torch.testing.assert_close(model(image), expected)


def test_layers_are_equal_and_can_be_cut_anywhere() -> None:
    model = zoo.MODELS["uniform"].make()
    assert {tuple(parameter.shape) for parameter in model.parameters()} == {(64, 64)}
    names = [node.name for node in fx.symbolic_trace(model).graph.nodes]
    assert names == ["image", *(f"layer{index}" for index in range(16)), "output"]


@pytest.mark.parametrize("option", ["num_layers", "width"])
def test_wrong_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"uniform: {option} is 0, allowed is 1 or more"):
        zoo.MODELS["uniform"].make(**{option: 0})
