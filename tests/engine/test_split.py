"""Split backwards train as whole ones, bit for bit, for any set of layers that can be split; memory in between."""

import copy
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.engine.replica import Replica, ReplicaRules, UnitInput
from pipebench.model.graph import trace
from pipebench.model.plan import make_plan
from pipebench.model.splitting import unsplit
from pipebench.model.stage import cut_stage
from tests.engine.test_modes import images, sequentially
from tests.models import ConvNet, RandomNet, SkipNet, Tied
from tests.support import Blobs, Mlp, make_engine, make_setup, momentum, parameters_of


class Recurrent(nn.Module):
    """An LSTM between layers that can be split; its output is read twice. Double precision, [n, 6] to [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(10, 4)
        self.gain = nn.Parameter(torch.ones(10))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take the features as two steps of three."""
        out, _ = self.lstm(self.norm(self.first(x)).unflatten(1, (2, 3)))
        flat = out.flatten(1)
        return self.head(flat * self.gain + flat)


class Turned(nn.Linear):
    """A layer that does a little more than the one of torch's that it is derived from."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, features] to [n, 6]."""
        return super().forward(x.t().contiguous().t()).flip(1)


class Derived(nn.Module):
    """Such a layer, called twice. Double precision, [n, 6] to [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.turned, self.table = Turned(6, 6), nn.Embedding(3, 6)
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        hidden = torch.tanh(self.turned(torch.tanh(self.turned(x))))
        return self.head(hidden + self.table((x[:, 0] > 0).long()))


class Decoder(nn.Module):
    """Tokens in; the table of the embedding is the output layer's weight, and is used by a function besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.table, self.middle, self.head = nn.Embedding(4, 6), nn.Linear(6, 6), nn.Linear(6, 4, bias=False)
        self.head.weight = self.table.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        hidden = torch.tanh(self.middle(self.table((x > 0).long() + 1))).sum(1)
        return self.head(hidden) + nn.functional.linear(hidden, self.table.weight)


MODELS: dict[str, tuple[Any, list[int]]] = {
    "mlp": (Mlp, [2, 4]), "skip": (SkipNet, [3, 5]), "recurrent": (Recurrent, [2, 5]), "tied": (Tied, [3]),
    "derived": (Derived, []), "decoder": (Decoder, []),
    "random": (lambda: RandomNet([[0], [0, 1], [1], [2, 3]]), [2, 4]),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "columns",
    [
        {"order": "zero-bubble", "microbatches": 4},
        {"order": "zero-bubble", "accumulate": 4},
        {"order": "zero-bubble", "microbatches": 3, "recompute": True},
        {"order": "1f1b", "microbatches": 2},
        {"order": "all-forwards", "microbatches": 2},
    ],
    ids=str,
)
def test_split_backwards_equal_sequential_training(name: str, columns: dict[str, Any]) -> None:
    """Double precision, a short last minibatch and a short last group."""
    make, starts = MODELS[name]
    dataset, model = Blobs(num_train=46), make()
    plan = (starts, [1] * (len(starts) + 1))
    setup = make_setup(
        model, plan, weights="one", dataset=dataset, make_optimizer=momentum, backward="split", **columns
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, 12)
    group = columns.get("accumulate", 1)
    groups = [range(a, min(a + group, 12)) for a in range(0, 12, group)]
    expected = sequentially(model, dataset, groups, 4, momentum)
    found = parameters_of(engine)
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-11, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [[2, 2], [2, 1], [1, 3]], ids=str)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_replicated_stages_equal_sequential_training(replicas: list[int], clip_norm: float | None) -> None:
    dataset, model = Blobs(num_train=46), Mlp()
    setup = make_setup(
        model, ([4], replicas), weights="one", order="zero-bubble", backward="split", microbatches=2, dataset=dataset,
        make_optimizer=momentum, clip_norm=clip_norm,
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, 23)
    size = math.lcm(*replicas)
    groups = [range(k, min(k + size, 23)) for k in range(0, 23, size)]
    expected = sequentially(model, dataset, groups, 4, momentum, clip_norm)
    tolerance = 1e-11 if clip_norm is None else 1e-6  # the shared norm travels in single precision
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("columns", [{"weights": "one", "microbatches": 4}, {"weights": "stash"}], ids=str)
def test_split_backwards_have_the_bits_of_whole_ones(columns: dict[str, Any], recompute: bool) -> None:
    """Single precision, BatchNorm, in-place layers and dropout; with a flush and without."""
    found = []
    orders = ["1f1b", "zero-bubble"] if columns["weights"] == "one" else ["1f1b"]
    for order, backward in [("1f1b", "whole"), *((order, "split") for order in orders)]:
        setup = make_setup(
            ConvNet(dropout=0.3), ([2, 5, 8], [1, 1, 1, 1]), order=order, backward=backward, dataset=images(),
            make_optimizer=momentum, recompute=recompute, minibatch_size=8, **columns,
        )  # fmt: skip
        engine = make_engine(setup)
        engine.train(0, 7)
        found.append({n: t for r in engine.replicas for n, t in r.tensors().items()})
    for other in found[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in found[0].items())


def replica_of(model: nn.Module) -> Replica:
    """Return the whole model as one stage whose backwards come in two parts."""
    graph = trace(model)
    stage = cut_stage(graph, make_plan(graph, [], [1]), 0)
    return Replica(stage, momentum, device=torch.device("cpu"), seed=0, rules=ReplicaRules(split=True))


def test_the_second_part_keeps_only_what_layers_with_weights_need() -> None:
    """Of conv, tanh, pool, linear: the inputs of the two layers and the gradients of their outputs."""
    torch.default_generator.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 4))
    replica, x = replica_of(model), torch.randn(5, 3, 8, 8)
    before = replica.live_bytes()
    replica.forward(UnitInput(0, (0, 0), [x], {}, 0, loss=lambda output: output.square().sum()))
    image, hidden, pooled, out = 5 * 3 * 64, 5 * 4 * 64, 5 * 64, 5 * 4
    # Tanh keeps its output, which pooling keeps too, with indices of 8 bytes; the square keeps the output.
    assert replica.live_bytes() - before == 4 * (image + hidden + pooled + out) + 8 * pooled
    replica.backward_input(0, {})
    assert replica.live_bytes() - before == 4 * (image + pooled + hidden + out)
    assert all(gradient is None for gradient in replica.gradients)
    replica.backward_weight(0)
    assert replica.live_bytes() - before == sum(p.nbytes for p in model.parameters())


class Held:
    """A tensor that autograd keeps, in an object that weak references can follow."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_memory_is_freed_after_each_part() -> None:
    """The output of tanh goes with the input part, the input of a layer with weights with the weight part."""
    torch.default_generator.manual_seed(3)
    replica = replica_of(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Softplus(), nn.Linear(5, 4)).double())
    boxes: list[tuple[tuple[int, ...], weakref.ref[Held]]] = []

    def pack(tensor: torch.Tensor) -> Held:
        box = Held(tensor)
        boxes.append((tuple(tensor.shape), weakref.ref(box)))
        return box

    def alive() -> list[tuple[int, ...]]:
        return [shape for shape, box in boxes if box() is not None and shape[0] == 3]

    x = torch.randn(3, 6, dtype=torch.float64)
    for unit in (0, 1):  # the first one is measured
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            replica.forward(UnitInput(unit, (unit, 0), [x], {}, 0, loss=lambda output: output.square().sum()))
        before = alive()
        replica.backward_input(unit, {})
        between = alive()
        replica.backward_weight(unit)
        assert alive() == []
    # Inputs of the linear layers, tanh's output, softplus's input, the square's.
    assert sorted(before) == [(3, 4), (3, 5), (3, 5), (3, 5), (3, 6)]
    assert sorted(between) == [(3, 5), (3, 6)]


def test_layers_with_whole_backwards_have_their_gradients_after_the_first_part() -> None:
    replica = replica_of(Recurrent())
    x = torch.randn(3, 6, dtype=torch.float64)
    replica.forward(UnitInput(0, (0, 0), [x], {}, 0, loss=lambda output: output.square().sum()))
    replica.backward_input(0, {})
    present = {n for n, g in zip(replica.weights.names, replica.gradients, strict=True) if g is not None}
    assert present == {"gain", *(name for name in replica.weights.names if name.startswith(("lstm.", "norm.")))}
    passed_on: list[int] = []
    replica.backward_weight(0, lambda index, _: passed_on.append(index))
    names = [replica.weights.names[index] for index in passed_on]
    assert sorted(names) == sorted({*replica.weights.names} - present)
    assert names.index("head.weight") < names.index("first.weight")  # the last layer first, as buckets set out


def test_a_shared_weight_s_gradient_is_reported_once() -> None:
    model = Tied()
    replica, plain = replica_of(copy.deepcopy(model)), copy.deepcopy(model)
    x = torch.randn(3, 6, dtype=torch.float64)
    replica.forward(UnitInput(0, (0, 0), [x], {}, 0, loss=lambda output: output.square().sum()))
    replica.backward_input(0, {})
    passed_on: dict[str, torch.Tensor] = {}
    calls: list[int] = []

    def report(index: int, gradient: torch.Tensor) -> None:
        calls.append(index)
        passed_on[replica.weights.names[index]] = gradient.clone()

    replica.backward_weight(0, report)
    plain(x).square().sum().backward()
    assert len(calls) == len({*calls}) == len(passed_on)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(passed_on[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_layers_with_whole_backwards_are_named() -> None:
    assert unsplit(trace(Mlp())) == unsplit(trace(ConvNet())) == ""
    assert unsplit(trace(Recurrent())) == "lstm (LSTM), mul (mul)"
    many = nn.Sequential(*(nn.PReLU() for _ in range(10)))
    assert unsplit(trace(many)).endswith("_7 (PReLU) and 2 more")
