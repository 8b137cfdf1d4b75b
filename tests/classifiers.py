"""Tests of every classifier of torchvision in every mode: `nox -s matrix` runs all, `nox -s tests` a part of them."""

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from pipebench.model.graph import trace
from tests.evaluations import MODES, Images, assert_scores_are_the_weights, mode_setup, trained

# Pixels per side of the smallest images that models accept, if more than 64; and options of models.
SIZES = {"inception_v3": 299, "maxvit_t": 224}
OPTIONS: dict[str, dict[str, Any]] = {
    "inception_v3": {"init_weights": False},
    "googlenet": {"init_weights": False},
    **{name: {"image_size": 64} for name in ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32")},
    "vit_h_14": {"image_size": 56},
}
LARGEST = 100_000_000  # parameters, of which a test holds up to five copies of 8 bytes
NAMES = torchvision.models.list_models(module=torchvision.models)


def classifier(name: str) -> nn.Module:
    """Return a classifier of torchvision with four classes and random weights, in double precision."""
    torch.default_generator.manual_seed(5)
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=4, **OPTIONS.get(name, {}))
    return model.double()


def check(name: str, mode: str, num_minibatches: int = 2) -> None:
    """Train a few minibatches, cut at three places, and compare the logged scores with those in plain torch."""
    size = SIZES.get(name, OPTIONS.get(name, {}).get("image_size", 64))
    model = classifier(name)
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        pytest.skip(f"{name} has more than {LARGEST} parameters: too large to be held several times here")
    dataset = Images(size, num_train=8, num_eval=6)
    num_layers = len(trace(model).layers)
    starts = [num_layers // 5, num_layers // 2, num_layers - 3]
    setup = mode_setup(model, mode, starts, dataset=dataset)
    assert_scores_are_the_weights(trained(setup, num_minibatches), model)


def test_the_list_has_the_classifiers_of_torchvision() -> None:
    assert len(NAMES) >= 80


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_weights_in_plain_torch(name: str, mode: str) -> None:
    check(name, mode)
