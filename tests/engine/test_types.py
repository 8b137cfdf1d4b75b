"""Parameters keep their types, in every version; those without a gradient are left alone, as torch leaves them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.evaluations import MODES, mode_setup, trained
from tests.models import FrozenPart, MixedTypes
from tests.support import momentum, parameters_of


def plain(model: nn.Module, setup: Any, groups: list[range]) -> dict[str, torch.Tensor]:
    """Train a model in a plain loop: each group of minibatches is one update."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=0.01)
    for group in groups:
        optimizer.zero_grad()
        fields = [setup.dataset.fetch("train", setup.sampler.indices(k), ["x", "label"]) for k in group]
        count = sum(len(field["label"]) for field in fields)
        for field in fields:
            (functional.cross_entropy(model(field["x"]), field["label"], reduction="sum") / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_parameters_of_one_stage_keep_their_types() -> None:
    setup = mode_setup(MixedTypes(), "single", [], make_optimizer=momentum)
    engine = trained(setup, 4)
    expected = plain(MixedTypes(), setup, [range(k, k + 1) for k in range(4)])
    found = parameters_of(engine)
    assert {str(parameter.dtype) for parameter in found.values()} == {
        "torch.float32",
        "torch.bfloat16",
        "torch.float64",
    }
    for name, parameter in expected.items():
        assert found[name].dtype == parameter.dtype
        assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize("mode", MODES)
def test_versions_and_replicas_keep_types(mode: str) -> None:
    engine = trained(mode_setup(MixedTypes(), mode, [4], make_optimizer=momentum))
    types = {name: parameter.dtype for name, parameter in MixedTypes().named_parameters()}
    assert {name: parameter.dtype for name, parameter in parameters_of(engine).items()} == types
    bytes_of = {name: parameter.nbytes for name, parameter in MixedTypes().named_parameters()}
    for replica in engine.replicas:
        assert replica.weights.version_bytes == sum(bytes_of[name] for name in replica.weights.names)


def test_every_parameter_is_aligned_as_a_separate_tensor() -> None:
    (replica,) = trained(mode_setup(MixedTypes(), "single", [])).replicas
    weights = replica.weights
    for flat in weights.newest.flats:
        inside = [p for p in weights.newest.parameters if p.untyped_storage().data_ptr() == flat.data_ptr()]
        assert inside
        assert all((parameter.data_ptr() - flat.data_ptr()) % 256 == 0 for parameter in inside)


@pytest.mark.parametrize("mode", ["single", "dp", "model", "pipedream-flush"])
def test_parameters_without_a_gradient_stay_as_they_are(mode: str) -> None:
    setup = mode_setup(FrozenPart(), mode, [3], make_optimizer=momentum)
    size = setup.pipeline.round_size(0)
    groups = [range(start, start + size) for start in range(0, 4, size)]
    found = parameters_of(trained(setup, 4))
    for name, parameter in plain(FrozenPart(), setup, groups).items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-12, atol=1e-14, msg=name)
    assert torch.equal(found["a.weight"], FrozenPart().a.weight)
