"""Values that tracing would freeze are refused with their line; what tracing loses is found by comparing outputs."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.errors import GraphError, TracingError
from pipebench.model.graph import LayerGraph, as_one_layer, is_random, trace
from pipebench.model.plan import make_plan
from pipebench.model.trace_check import check_traced
from pipebench.model.tracing import TracedModule
from tests.evaluations import assert_scores_are_the_weights, mode_setup, trained
from tests.support import Blobs


class Net(nn.Module):
    """Calls a function of a test's own between two layers."""

    def __init__(self, middle: Callable[["Net", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.middle = middle
        self.calls = 0
        self.generator = torch.Generator().manual_seed(1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.c(torch.relu(self.middle(self, self.a(x))))


def no_grad(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net.b(x)


def autocast(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.b(x)


def inference(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return net.b(x)


def frozen_noise(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(6, dtype=torch.float64)


def layer_drop(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x if net.training and random.random() < 0.5 else net.b(x)


def numpy_noise(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())


def branch(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else net.b(x)


class Reverse(torch.autograd.Function):
    """Turns gradients round, as adversarial training does: torch.fx traces through its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -gradients[0]


def reverse(net: Net, x: torch.Tensor) -> torch.Tensor:
    return Reverse.apply(x)


def calls_compiled(net: Net, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.11's compiler uses what it deprecates
        compiled = torch.compile(torch.relu)
    return compiled(x)


def assigns(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.steps = net.steps + 1
    return x


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (no_grad, r"test_tracing.py:\d+ \(return net.b\(x\).*\): torch.no_grad, .* are lost .* use .detach\(\)"),
        (autocast, r"autocast, .* are lost"),
        (inference, r"inference_mode and autocast, .* are lost"),
        (reverse, r"return x.view_as\(x\).* the backward of an autograd.Function, are lost"),
        (frozen_noise, r"test_tracing.py:\d+ \(return x \+ torch.randn.*the random numbers of randn"),
        (layer_drop, "by torch.fx: random numbers of Python's random module would be drawn once"),
        (numpy_noise, "random numbers of NumPy would be drawn once"),
        (calls_compiled, "torch.compile has compiled it; leave that out, and set engine.compile: true"),
        (assigns, r"Net changes its buffer steps while .* write into it \(self.steps.copy_\(...\)\), or name"),
        (branch, r"test_tracing.py:\d+ .*control flow.* into a module of its own .* modes single and dp"),
    ],
)
def test_values_that_tracing_would_freeze_are_refused(middle: Any, says: str) -> None:
    with pytest.raises(TracingError, match=says):
        trace(Net(middle))


def test_all_random_numbers_of_numpy_are_refused() -> None:
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        trace(Net(lambda net, x: net.b(x)))
        with pytest.raises(TracingError, match="random numbers of NumPy would be drawn once"):
            trace(Net(numpy_noise))
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]


def hooked(net: Net, x: Any) -> torch.Tensor:
    x = x * 1.0
    if not isinstance(x, torch.fx.Proxy) and x.requires_grad:  # code may forget something where it is traced
        x.register_hook(lambda gradient: -gradient)
    return x


def counts(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.calls += 1
    return x * net.calls


def own_generator(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(6, generator=net.generator, dtype=torch.float64)


def hidden_write(net: Net, x: torch.Tensor) -> torch.Tensor:
    part = x[:, 0]
    part.fill_(1.0)
    return x


def honest(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = functional.dropout(net.b(x), 0.5)  # in evaluation, too
    x[:, 0] = 1.0
    x[:, 1:3] += 2.0
    net.steps.add_(1)
    return x


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (hooked, r"its gradient of .* in training is another than the model's own.*model.leaves"),
        (counts, "its .* differs from call to call"),
        (own_generator, "its .* differs from call to call"),
        (hidden_write, "its output 0 in training is another than"),
    ],
)
def test_a_traced_model_that_differs_is_refused(middle: Any, says: str) -> None:
    model = Net(middle)
    graph = trace(model)
    with pytest.raises(GraphError, match=says):
        check_traced(graph, Blobs())


class Remembers(nn.Module):
    """Computes with its weight by another name than its own."""

    one_layer = True

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6) + 0.1)
        self.listed = [self.weight]
        self.read = {"a function": lambda: self.weight, "a list": lambda: self.listed[0], "itself": self.own}[how]

    def own(self) -> torch.Tensor:
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.read()


@pytest.mark.parametrize("layers", [[nn.Linear(6, 6), nn.Linear(6, 4)], []])
def test_weights_that_a_module_does_not_read_from_itself_are_refused(layers: list[nn.Module]) -> None:
    def check(how: str) -> None:
        model = nn.Sequential(*layers[:1], Remembers(how), *layers[1:]).double()
        check_traced(trace(model) if layers else as_one_layer(model), Blobs())

    check("itself")
    for how in ("a function", "a list"):
        with pytest.raises(GraphError, match=r"its gradient of \d.weight is another .* not from a list or a function"):
            check(how)


class Normalised(nn.Module):
    """The bias of the first layer has no gradient but for rounding, as BatchNorm subtracts it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        if not isinstance(x, torch.Tensor):  # as it is traced: rounded otherwise
            hidden = hidden * 3.0 / 3.0
        return self.head(self.norm(hidden))


def test_gradients_that_are_only_rounding_may_differ() -> None:
    for seed in range(8):
        torch.default_generator.manual_seed(seed)
        check_traced(trace(Normalised().double()), Blobs(), [4])


def test_comparing_changes_no_state() -> None:
    model = Net(honest)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = trace(model)
    torch.default_generator.manual_seed(9)
    state = torch.default_generator.get_state()
    check_traced(graph, Blobs())
    assert torch.equal(torch.default_generator.get_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Assigning(nn.Module):
    """Makes its buffer by assigning."""

    one_layer = True
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, 6] without the running mean of it."""
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Counting(Assigning):
    """Counts its calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, 6] without the running mean of it, times the number of calls."""
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(("form", "kind"), [(as_one_layer, Assigning), (as_one_layer, Counting), (trace, Assigning)])
def test_comparing_restores_assigned_attributes(form: Callable[[nn.Module], LayerGraph], kind: type[Assigning]) -> None:
    """0.2.0: a run began with the running means and counts of the samples that were compared."""
    part = kind()
    graph = form(nn.Sequential(nn.Linear(6, 6), part, nn.Linear(6, 4)).double())
    assert (len(graph.layers) > 1) is (form is trace)
    check_traced(graph, Blobs())
    assert not getattr(part, "calls", 0)
    assert not part.mean.any()


def test_a_buffer_counts_in_a_graph_as_in_the_model_and_tracing_does_not_change_it() -> None:
    def up(net: Net, x: torch.Tensor) -> torch.Tensor:
        net.steps += 2
        steps = net.steps
        steps -= 1
        return net.b(x) * steps

    model = Net(up)
    graph = trace(model)
    assert int(model.steps) == 0
    check_traced(graph, Blobs())
    engine = trained(mode_setup(model, "model", [1]), 2)
    [found] = [tensors["steps"] for replica in engine.replicas if "steps" in (tensors := replica.tensors())]
    assert int(found) == 2


def pairs_only(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.b(x.view(2, 2, 6)).view(4, 6)


def test_a_model_that_takes_one_number_of_samples_is_compared_at_that() -> None:
    graph = trace(Net(pairs_only))
    with pytest.raises(RuntimeError, match="shape"):
        check_traced(graph, Blobs())
    check_traced(graph, Blobs(), [4])
    with pytest.raises(GraphError, match="another than"):
        check_traced(trace(Net(lambda net, x: hooked(net, pairs_only(net, x)))), Blobs(), [4])


def test_parts_that_are_assigned_to_are_cut_anywhere() -> None:
    layers = trace(Net(honest)).layers
    assert [layer.kind for layer in layers if layer.kind == "set_item"] == ["set_item"] * 2
    losses = set()
    for start in range(1, len(layers)):
        engine = trained(mode_setup(Net(honest), "model", [start]), 2)
        losses.add(round(engine.evaluate()["eval_loss"], 12))
        found = [tensors for replica in engine.replicas if "steps" in (tensors := replica.tensors())]
        assert [int(tensors["steps"]) for tensors in found] == [5]  # two minibatches trained, three evaluated
    assert len(losses) == 1


def asserts(net: Net, x: torch.Tensor) -> torch.Tensor:
    n, width = x.shape
    assert width == 6
    assert (
        width
        == 6
    ), f"{n} samples"  # fmt: skip
    assert n > 0 and width == 6  # noqa: PT018 (as people write it)
    return x


def test_assertions_about_values_hold_while_tracing() -> None:
    graph = trace(Net(asserts))
    assert "b" not in [layer.name for layer in graph.layers]
    check_traced(graph, Blobs())


class Masked(nn.Module):
    """Takes an optional mask and a required argument, for which no field is given."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 2.0) -> torch.Tensor:
        """Return x, masked if asked for, times a scale."""
        return (x if mask is None else x * mask) * scale


def test_arguments_without_a_field_keep_their_defaults() -> None:
    graph = trace(Masked(), fed=1)
    assert graph.inputs == ("x",)
    assert [layer.kind for layer in graph.layers] == ["mul"]
    assert trace(Masked()).inputs == ("x",)
    assert trace(Masked(), fed=2).inputs == ("x", "mask")
    assert as_one_layer(Masked(), 2).inputs == ("x", "mask")


def test_unknown_leaves_are_refused() -> None:
    with pytest.raises(GraphError, match=r"model.leaves: model Net has no module 'Linea', .* did you mean 'Linear'"):
        trace(Net(honest), ["Linea"])


class Translator(nn.Module):
    """torch's Transformer, inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.into = nn.Linear(2, 8)
        self.whole = nn.Transformer(8, 2, 2, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(24, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        x = self.into(x.view(x.size(0), 3, 2))
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
        return self.head(self.whole(x, x, tgt_mask=mask).flatten(1))


def test_transformers_are_cut_between_their_layers() -> None:
    graph = trace(Translator())
    kinds = [layer.kind for layer in graph.layers]
    assert kinds.count("TransformerEncoderLayer") == kinds.count("TransformerDecoderLayer") == 2
    check_traced(graph, Blobs())
    for start in range(1, len(graph.layers)):
        make_plan(graph, [start], [1, 1])
    for mode in ("dp", "gpipe", "pipedream"):
        setup = mode_setup(Translator(), mode, [4, 6])
        assert_scores_are_the_weights(trained(setup), Translator())
    leaf = [layer.kind for layer in trace(Translator(), ["Transformer"]).layers]
    assert leaf.count("Transformer") == 1


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (functional.relu, False),
        (torch.relu, False),
        (torch.cat, False),
        (functional.layer_norm, False),
        (functional.dropout, True),
        (functional.scaled_dot_product_attention, True),
        (functional.gumbel_softmax, True),
        (torch.rand_like, True),
        (torch.bernoulli, True),
        (no_grad, True),
    ],
)
def test_functions_that_may_draw_are_known(function: Any, draws: bool) -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(function, (graph.placeholder("x"),))
    assert is_random(nn.Module(), node) is draws


def test_methods_that_draw_are_known() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    drawn = {name: is_random(nn.Module(), graph.call_method(name, (x,))) for name in ("normal_", "bernoulli", "view")}
    assert drawn == {"normal_": True, "bernoulli": True, "view": False}


def test_a_forward_is_compiled_at_its_first_call_from_the_graph() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (x, 2))
    graph.output(doubled)
    module = TracedModule(nn.Module(), graph)
    unused = copy.deepcopy(module)
    assert not any("forward" in vars(type(each)) for each in (module, unused))
    assert module(torch.tensor(3)) == 6
    doubled.args = (x, 5)
    assert module(torch.tensor(3)) == 6, "as torch.fx's, until it is told"
    module.recompile()
    assert (module(torch.tensor(3)), copy.deepcopy(module)(torch.tensor(3))) == (15, 15)
    assert unused(torch.tensor(3)) == 6
