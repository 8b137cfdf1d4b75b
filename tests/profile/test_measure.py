"""The measured profile: what it leaves alone, and bounds so loose that only nonsense fails them."""

import pytest
import torch
from torch import nn

from pipebench.graph import trace
from pipebench.profile import Profile, measured_profile
from pipebench.recipe.schema import OptimizerRecipe
from tests.support import Blobs
from zoo.mnist5k import mnist5k
from zoo.vgg import VGG, vgg16

SGD = OptimizerRecipe("sgd", lr=0.1, momentum=0.9)
CPU = torch.device("cpu")


def narrow() -> VGG:
    made: VGG = vgg16(width=0.125, batch_norm=True, num_classes=10, in_channels=1, image_size=32)
    return made


@pytest.fixture(scope="module")
def profile() -> Profile:
    return measured_profile(trace(narrow()), mnist5k(), [4, 16], SGD, CPU, "narrow vgg16", repeats=3)


def test_every_layer_and_size_is_there(profile: Profile) -> None:
    names = [layer.name for layer in trace(narrow()).layers]
    for size in (4, 16):
        assert [row.name for row in profile.layers[size]] == [*names, "loss"]
        assert profile.load_s[size] > 0
        assert all(row.forward_s > 0 for row in profile.layers[size])
    assert profile.source == "measured"
    assert profile.update_floor_s > 0


def test_sum_over_layers_is_about_a_whole_step(profile: Profile) -> None:
    total = sum(row.forward_s + row.backward_s for row in profile.layers[16])
    assert 0.5 < total / profile.whole_step_s[16] < 2
    assert "sum over layers / whole step: " in profile.note
    assert ", torch " in profile.note


def test_model_and_random_state_are_left_as_found() -> None:
    model = narrow().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    measured_profile(trace(model), mnist5k(), [2], SGD, CPU, "narrow", repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_progress_ends_at_the_total() -> None:
    told: list[tuple[int, int]] = []
    graph = trace(nn.Linear(6, 4, dtype=torch.float64))
    measured_profile(graph, Blobs(), [2, 3], SGD, CPU, "linear", 2, lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (4, 4)


def test_a_model_without_parameters() -> None:
    graph = trace(nn.Tanh())
    profile = measured_profile(graph, Blobs(shape=(4,)), [2], SGD, CPU, "tanh", repeats=1)
    assert (profile.update_s_per_byte, profile.update_floor_s) == (0, 0)
    assert profile.layers[2][0].backward_s == 0


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_optimizers(name: str) -> None:
    graph = trace(nn.Linear(6, 4, dtype=torch.float64))
    assert measured_profile(graph, Blobs(), [2], OptimizerRecipe(name, lr=0.1), CPU, "", 1).update_floor_s > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    found = measured_profile(trace(narrow()), mnist5k(), [16], SGD, torch.device("cuda"), "narrow vgg16", repeats=3)
    assert all(row.forward_s >= 0 for row in found.layers[16])
    assert found.whole_step_s[16] > 0
