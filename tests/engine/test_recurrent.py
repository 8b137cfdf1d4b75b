"""Weight versions of recurrent layers have cuDNN's layout, so that PyTorch doesn't copy them when versions change."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.engine.weights import Weights
from tests.support import Blobs, make_engine, make_setup, parameters_of


class Recurrent(nn.Module):
    """A linear layer, an LSTM of two layers and two directions, a GRU, a linear layer; [n, 6] to [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.enter = nn.Linear(6, 5)
        self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(8, 3, batch_first=True)
        self.leave = nn.Linear(3, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read the features as a sequence of two."""
        x = self.enter(x)
        x = torch.stack([x, x.flip(1)], 1)
        x, _ = self.lstm(x)
        x, _ = self.gru(x)
        return self.leave(x[:, -1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True)


def test_every_recurrent_module_has_its_own_storage_matrices_before_biases() -> None:
    model = Recurrent()
    weights = Weights(model, sgd)
    for module in (model.lstm, model.gru):
        names = module._flat_weights_names
        ordered = [n for n in names if n.startswith("weight")] + [n for n in names if n.startswith("bias")]
        position = 0
        storage = getattr(module, names[0]).untyped_storage()
        for name in ordered:
            parameter = getattr(module, name)
            assert parameter.untyped_storage().data_ptr() == storage.data_ptr()
            assert parameter.storage_offset() == position
            position += parameter.numel()
        assert storage.nbytes() == position * 8
    assert len(weights.newest.flats) == 3


def test_binding_a_version_leaves_nothing_for_pytorch_to_flatten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Recurrent()
    weights = Weights(model, sgd)
    first = weights.newest
    weights.use(0)  # in flight, so that the update makes a new version
    weights.update([torch.ones_like(p) for p in first.parameters], 0.1, keep_from=1)
    assert weights.newest is not first
    calls = []
    monkeypatch.setattr(nn.RNNBase, "_init_flat_weights", lambda self: calls.append(self))
    x = torch.ones(2, 6, dtype=torch.float64)
    outputs = []
    for version in (first, weights.newest, first):
        weights.bind(version)
        outputs.append(model(x))
    assert not calls
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.allclose(outputs[0], outputs[1])


@pytest.mark.parametrize("plan", [([], [1]), ([3, 5], [1, 1, 1])], ids=["single", "model"])
def test_recurrent_layers_train_as_in_a_plain_loop_to_the_bit(plan: Any) -> None:
    model, data = Recurrent(), Blobs()
    setup = make_setup(model, plan, weights="one", depth=1, dataset=data, make_optimizer=sgd)
    engine = make_engine(setup)
    engine.train(0, 9)
    plain = copy.deepcopy(model)
    optimizer = sgd(list(plain.parameters()))
    for k in range(9):
        fetched = data.fetch("train", setup.sampler.indices(k), ["x", "label"])
        optimizer.zero_grad()
        (data.loss(plain(fetched["x"]), fetched) / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = dict(plain.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in parameters_of(engine).items())


def test_shared_and_frozen_weights_keep_their_storage() -> None:
    model = Recurrent()
    model.gru.bias_hh_l0.requires_grad_(False)
    weights = Weights(model, sgd)
    assert len(weights.newest.flats) == 2
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()


def test_a_recurrent_module_of_two_types_has_a_buffer_per_type() -> None:
    module = nn.RNN(2, 3)
    module.weight_ih_l0 = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    flats = Weights(module, sgd).newest.flats
    assert sorted(str(flat.dtype) for flat in flats) == ["torch.float32", "torch.float64"]
