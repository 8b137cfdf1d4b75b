"""What models carry from call to call beside buffers: refused where layers would lose it, right in a single layer."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.errors import GraphError, TracingError
from pipebench.model.carried_state import attributes_of, changed_in, marks_of, shifted_weights
from pipebench.model.graph import LayerGraph, as_one_layer, trace
from pipebench.model.trace_check import check_traced
from tests.evaluations import mode_setup, trained
from tests.support import Blobs


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(5)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class Averaged(Net):
    """Evaluated with a moving average of its weights, which every forward moves, as of mean teachers."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(nn.Sequential(self.a, nn.ReLU(), self.b)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            average: torch.Tensor = self.average(x)
            return average
        with torch.no_grad():
            for each, new in zip(self.average.parameters(), [*self.a.parameters(), *self.b.parameters()], strict=True):
                each.lerp_(new, 0.1)
        return super().forward(x)


class Normed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.weight.data = functional.normalize(self.b.weight.data, dim=1)
        return super().forward(x)


class Merging(nn.Linear):
    """Adds a low-rank product to its weight in evaluation, and takes it away in training, as loralib does."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.left, self.right = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.ones(2, 6))
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if mode is self.merged:
            product = self.left @ self.right
            self.weight.data += -product if mode else product
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = super().forward(x)
        return own if self.merged else own + functional.linear(x, self.left @ self.right)


class Merged(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = Merging().double()


class Annealed(Net):
    """Has a factor that grows with its calls in training."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return super().forward(x) * min(1.0, self.steps / 20)


class Late(Annealed):
    """Changes after a thousand calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return Net.forward(self, x) * (2.0 if self.steps > 1000 else 1.0)


class Listing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(0)
        return super().forward(x) / len(self.seen)


class Carrying(Net):
    """Adds what it had the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.last is None else x + 0.001 * self.last
        self.last = self.a(x).detach().mean(0)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Averaged, "its forward, train.. or eval.. changes parameter average.0.weight, which .*register_buffer"),
        (Normed, "changes parameter b.weight,"),
        (Merged, "changes parameter a.weight,"),
        (Annealed, r"its output 0 \(with its attribute steps\) in training differs from call to call.*steps.add_\(1\)"),
        (Listing, r"its output 0 \(with its attribute seen\) in training differs"),
        (Carrying, r"its output 0 \(with its attribute last\) in training differs .* a state in carried_state"),
    ],
)
def test_what_layers_would_lose_is_refused(kind: Callable[[], Net], says: str) -> None:
    """0.2.0: averages stayed as they began, steps at 1, and a state at its first value, in every mode."""
    model = kind()
    graph = trace(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GraphError, match=says) as raised:
        check_traced(graph, Blobs())
    assert f"as one layer in mode single or dp (model.leaves: [{kind.__name__}])" in str(raised.value)
    if kind in (Annealed, Listing, Carrying):
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_class_that_several_modules_have_is_not_named_as_the_whole() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), Merging(), nn.Linear(6, 4)).double()
    with pytest.raises(GraphError, match=re.escape("(name the class of a module around it in model.leaves)")):
        check_traced(trace(model), Blobs())


class Keeping(Net):
    """Keeps what it computes anew in every call, and numbers in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.calls: torch.Tensor
        self.shown: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the older way, which many models use
            nn.utils.weight_norm(self.a)
        nn.utils.spectral_norm(self.b)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.shown = self.a(x)
        return self.b(torch.relu(self.shown))


def test_what_every_call_computes_anew_is_no_state(capsys: pytest.CaptureFixture[str]) -> None:
    model = Keeping()
    graph = trace(model, ["a", "b"])
    before = copy.deepcopy(model.state_dict())
    check_traced(graph, Blobs())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("form", "kind", "says"),
    [
        (trace, Late, "Late changes steps in every call, which its layers don't: what"),
        (as_one_layer, Annealed, "Annealed changes steps in every call, which each replica does on its own, and no"),
        (as_one_layer, Late, ""),
        (as_one_layer, Averaged, ""),
    ],
)
def test_attributes_that_may_be_missed_are_named(
    form: Callable[[nn.Module], LayerGraph], kind: Callable[[], Net], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_traced(form(kind()), Blobs())
    found = capsys.readouterr().err
    assert found.startswith(f"pipebench: model {says}") if says else found == ""


def test_one_layer_may_not_change_what_is_trained() -> None:
    """0.2.0: an optimizer went on from other numbers than the forward's."""
    with pytest.raises(
        GraphError, match=r"its forward changes parameter b.weight, which updates alone .* F\.normalize"
    ):
        check_traced(as_one_layer(Normed()), Blobs())


def test_a_moving_average_in_one_layer_is_that_of_a_plain_loop() -> None:
    setup = mode_setup(Averaged(), "single", [], graph=as_one_layer(Averaged(), 1))
    engine = trained(setup, 4)
    model, data = Averaged().train(), setup.dataset
    optimizer = setup.make_optimizer([p for p in model.parameters() if p.requires_grad])
    for minibatch in range(4):
        fields = data.fetch("train", setup.sampler.indices(minibatch), ["x", "label"])
        optimizer.zero_grad()
        functional.cross_entropy(model(fields["x"]), fields["label"]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    (replica,) = engine.replicas
    found = {name.removeprefix("model."): tensor for name, tensor in replica.tensors().items()}
    frozen = dict(replica.module.named_parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found.get(name, frozen.get(f"model.{name}")), value)


def test_weights_are_shifted_and_come_back() -> None:
    model = nn.Sequential(nn.Linear(3, 9000), nn.Embedding(2, 3, dtype=torch.bfloat16))
    model.register_parameter("scale", nn.Parameter(torch.zeros(())))
    before, marks = copy.deepcopy(model.state_dict()), marks_of(model)
    with shifted_weights(model):
        assert all(mark != marks[name] for name, mark in marks_of(model).items())
        assert bool((model.state_dict()["scale"] > 0).all())
    assert marks_of(model) == marks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 3).tril().bool(),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(2, dtype=torch.complex64),
    ],
    ids=["mask", "sparse", "meta", "8 bits", "complex"],
)
def test_tensors_of_all_kinds_may_be_attributes_and_weights(tensor: torch.Tensor) -> None:
    model = Net()
    vars(model)["held"] = tensor
    before = attributes_of(model)
    assert changed_in(before, attributes_of(model)) == []
    if not tensor.is_meta:
        model.register_parameter("own", nn.Parameter(tensor, requires_grad=False))
        marks = marks_of(model)
        with shifted_weights(model):
            assert marks_of(model)["a.weight"] != marks["a.weight"]
        assert marks_of(model) == marks


def test_attributes_are_compared_by_value() -> None:
    model = Net()
    vars(model).update(count=1, when=float("nan"), cached=torch.ones(2), parts={"x": [1]}, names={"a"}, made=object())
    before = attributes_of(model)
    vars(model).update(cached=torch.ones(2), made=object())
    assert changed_in(before, attributes_of(model)) == []
    vars(model).update(cached=torch.zeros(2), parts={"x": [1, 2]}, names={"a", "b"}, new=3)
    assert changed_in(before, attributes_of(model)) == ["cached", "names", "new", "parts"]


def test_a_gradient_inside_of_a_forward_cannot_be_cut() -> None:
    class Slope(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
            return slope[:, :4]

    with pytest.raises(
        TracingError, match=r"test_carried_state.py:\d+ .*torch.autograd.grad needs .* modes single and dp"
    ):
        trace(Slope())
