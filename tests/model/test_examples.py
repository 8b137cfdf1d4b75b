"""Decisions by shapes and types are taken while a model is traced; those by numbers or the number of samples aren't."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from pipebench.errors import GraphError, TracingError
from pipebench.model import examples
from pipebench.model.examples import Example
from pipebench.model.graph import LayerGraph, trace
from pipebench.model.trace_check import check_traced
from tests.evaluations import assert_scores_are_the_weights, mode_setup, trained
from tests.support import Blobs

SIZES = (2, 3, 48)


class Net(nn.Module):
    """Calls a function of a test's own between two layers."""

    def __init__(self, middle: Callable[["Net", Any], Any]) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(6))
        self.middle = middle
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.c(torch.relu(self.middle(self, self.a(x))))


def examples_of(sizes: Sequence[int] = SIZES, name: str | int = 0) -> list[Example]:
    return [Example({name: Blobs().example(size)["x"]}) for size in sizes]


def traced(middle: Callable[[Net, Any], Any], sizes: Sequence[int] = SIZES, leaves: Sequence[str] = ()) -> LayerGraph:
    return trace(Net(middle), leaves, 1, examples=examples_of(sizes))


def by_dimensions(net: Net, h: Any) -> Any:
    if h.dim() != 2 or h.ndim == 3 or len(h.shape) != 2:
        raise ValueError("two dimensions are needed")
    return net.b(h)


def by_type(net: Net, h: Any) -> Any:
    return net.b(h) if h.dtype == torch.float64 else h


def by_width_behind_layers(net: Net, h: Any) -> Any:
    h = net.norm(net.b(h))
    padding = 8 - h.shape[-1]
    return functional.pad(h, (0, padding))[:, :6] if padding > 0 else h


def loops(net: Net, h: Any) -> Any:
    return torch.stack([h[:, i] * (i + 1) for i in range(h.size(1))], 1)


def lists(net: Net, h: Any) -> Any:
    return h.view(*h.shape[:-1], 2, 3).flatten(1)


def indexes(net: Net, h: Any) -> Any:
    return h * torch.ones(9, dtype=torch.float64)[: h.shape[1]]


def makes(net: Net, h: Any) -> Any:
    return h + torch.zeros(h.size(0), 6, dtype=h.dtype) + torch.tensor(h.size(1)) + torch.rand(h.size(0), 1) * 0


def limits(net: Net, h: Any) -> Any:
    return h.masked_fill(h < 0, torch.finfo(h.dtype).eps)


def in_forward(net: Net, h: Any) -> Any:
    return nn.Softmax(dim=1)(h) * 6


@pytest.mark.parametrize(
    "middle", [by_dimensions, by_type, by_width_behind_layers, loops, lists, indexes, makes, limits, in_forward]
)
def test_shapes_and_types_decide(middle: Callable[[Net, Any], Any]) -> None:
    """0.2.0: nearly all models of transformers were refused, and a quarter of timm's."""
    graph = traced(middle)
    check_traced(graph, Blobs())
    for mode in ("gpipe", "pipedream"):
        setup = mode_setup(Net(middle), mode, [1, len(graph.layers) - 2], graph=graph)
        assert_scores_are_the_weights(trained(setup), Net(middle))


def by_samples(net: Net, h: Any) -> Any:
    return net.b(h) if h.size(0) > 10 else h


def counts_samples(net: Net, h: Any) -> Any:
    return torch.stack([h[i] for i in range(h.size(0))])


def measures(net: Net, h: Any) -> Any:
    return h.view(len(h), -1)


def by_numbers(net: Net, h: Any) -> Any:
    return net.b(h) if h.sum() > 0 else h


def by_weights(net: Net, h: Any) -> Any:
    return net.b(h) if net.scale[0] > 0 else h


def by_device(net: Net, h: Any) -> Any:
    return net.b(h) if h.device.type == "cuda" or h.is_cuda else h


def by_device_index(net: Net, h: Any) -> Any:
    return net.b(h) if h.get_device() >= 0 else h


def by_class(net: Net, h: Any) -> Any:
    return net.b(h) if h.type() == "torch.cuda.DoubleTensor" else h


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (by_device_index, "control flow"),
        (by_class, "control flow"),
        (by_samples, "control flow"),
        (counts_samples, "is no number that is the same in every minibatch"),
        (measures, r"len\(\) of a value .* \.shape\[0\] can be traced"),
        (by_numbers, "control flow"),
        (by_weights, "control flow"),
        (by_device, "control flow"),
    ],
)
def test_what_may_differ_from_minibatch_to_minibatch_does_not_decide(middle: Any, says: str) -> None:
    with pytest.raises(TracingError, match=rf"test_examples.py:\d+ \(.*{says}"):
        traced(middle)


def test_fake_tensors_are_made_where_something_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them imports torch's compiler, which took half of the time until a run of a small model began."""
    made = []

    def fake_mode(**options: Any) -> Any:
        made.append(options)
        return FakeTensorMode(**options)

    monkeypatch.setattr(examples, "FakeTensorMode", fake_mode)
    traced(lambda net, h: net.b(h).view(h.shape[0], -1))
    assert made == []
    traced(by_type)
    assert len(made) == 2, "in training and in evaluation"


def test_without_examples_nothing_is_decided() -> None:
    with pytest.raises(TracingError, match="control flow"):
        traced(by_dimensions, ())


def test_a_size_that_the_model_does_not_take_decides_nothing() -> None:
    def pairs(net: Net, h: Any) -> Any:
        h = h.view(2, 2, 6)
        return (net.b(h) if h.dim() == 3 else h).view(4, 6)

    with pytest.raises(TracingError, match="control flow"):
        traced(pairs, (2, 4))
    assert "b" in [layer.name for layer in traced(pairs, (4,)).layers]


def test_a_single_sample_that_decides_otherwise_is_found() -> None:
    def broadcasts(net: Net, h: Any) -> Any:
        return h * 2 if h.size(0) == 1 else h

    graph = traced(broadcasts)
    check_traced(graph, Blobs(), [4])
    with pytest.raises(GraphError, match="its output 0 in training is another than the model's own"):
        check_traced(graph, Blobs(), [1, 4])
    check_traced(traced(by_width_behind_layers), Blobs(), [1, 4])  # BatchNorm takes no single sample


def test_a_single_sample_is_compared_in_evaluation_though_training_takes_none() -> None:
    """BatchNorm refuses one in training, so it was compared in neither."""

    def squeezes(net: Net, h: Any) -> Any:
        h = net.norm(h).squeeze()
        return h.unsqueeze(0) * 2 if h.dim() == 1 else h

    with pytest.raises(GraphError, match="in evaluation"):
        check_traced(traced(squeezes), Blobs(), [1, 4])


def test_a_graph_that_fails_where_the_model_does_not_is_refused() -> None:
    """The failure was taken for one of the model, which other numbers of samples could avoid."""

    def adds_a_dimension(net: Net, h: Any) -> Any:
        h.unsqueeze_(1)  # in place: what is known of `h` is from before
        return h[:, 0] if h.dim() == 3 else h

    with pytest.raises(
        GraphError, match=r"they fail in training, and the model itself doesn't, .* \(RuntimeError: Exp"
    ):
        check_traced(traced(adds_a_dimension), Blobs(), [4])


def by_full_precision(net: Net, h: Any) -> Any:
    return net.b(h) if h.dtype == torch.float32 else h


def by_half_precision(net: Net, h: Any) -> Any:
    h = net.b(net.norm(h.float()))  # layers round what they are given
    return h.clamp(max=6e4) if h.dtype == torch.float16 else h


def test_types_decide_as_training_in_bf16_has_them() -> None:
    """Models are traced in fp32; what was decided by that was run in bf16."""
    tensors: dict[str | int, torch.Tensor] = {0: torch.empty(4, 6, device="meta")}
    examples = [Example(tensors), Example(tensors, torch.bfloat16)]
    assert trace(Net(by_full_precision).float(), [], 1, examples=examples[:1])
    with pytest.raises(TracingError, match="control flow"):
        trace(Net(by_full_precision).float(), [], 1, examples=examples)
    assert trace(Net(by_half_precision).float(), [], 1, examples=examples)


class Named(nn.Module):
    """Has an argument of a name that torch.fx doesn't give a node."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4).double()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Map [n, 6] to [n, 4]."""
        return self.a(input) if input.dim() == 2 else input


def test_an_argument_may_have_the_name_of_a_builtin() -> None:
    assert len(trace(Named(), [], ["input"], examples=examples_of(name="input")).layers) == 1


class Pair(nn.Module):
    """A layer with two outputs."""

    one_layer = True

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return two tensors like `x`."""
        return {"one": x, "two": x + 1}


def test_keys_are_not_taken_for_parts() -> None:
    pair = Pair()

    def sums(net: Net, h: Any) -> Any:
        both = pair(h)
        return sum(both[name] for name in both)

    model = Net(sums)
    model.pair = pair
    with pytest.raises(TracingError, match="Proxy object cannot be iterated"):
        trace(model, [], 1, examples=examples_of())


class Remembering(nn.Module):
    """Makes tables in its first call and keeps them."""

    def __init__(self, *, one_layer: bool) -> None:
        super().__init__()
        self.one_layer = one_layer
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, 6]."""
        width = int(x.shape[1])
        if width not in self.tables:
            self.tables[width] = x.new_ones(width)
        if not hasattr(self, "table"):
            self.table = self.tables[width] * 2
        return x * self.tables[width] * self.table


@pytest.mark.parametrize("one_layer", [True, False])
def test_what_a_model_keeps_while_it_is_traced_is_forgotten(*, one_layer: bool) -> None:
    """Later calls read the fake tensors and the proxies."""
    own = Remembering(one_layer=one_layer)

    def decides(net: Net, h: Any) -> Any:
        h = own(h)
        return net.b(h) if h.dim() == 2 else h

    model = Net(decides)
    model.own = own
    graph = trace(model, [], 1, examples=examples_of())
    assert not own.tables
    assert not hasattr(own, "table")
    check_traced(graph, Blobs())


def test_a_buffer_that_a_forward_makes_stays() -> None:
    def makes_a_buffer(net: Net, h: Any) -> Any:
        if "places" not in dict(net.named_buffers()):
            net.register_buffer("places", torch.arange(6.0, dtype=torch.float64))
        return h + net.places

    check_traced(traced(makes_a_buffer), Blobs())


def test_what_others_keep_of_an_earlier_trace_is_refused() -> None:
    kept: dict[int, Any] = {}

    def remembers(net: Net, h: Any) -> Any:
        return h * kept.setdefault(6, net.scale[:6])

    with pytest.raises(TracingError, match=r"\(return h \* kept.*is a value of an earlier call"):
        traced(remembers)


def test_a_cache_between_layers_is_refused_with_the_way_out() -> None:
    own = Drawing()

    def caches(net: Net, h: Any) -> Any:
        return own(h, cache=Blobs())

    model = Net(caches)
    model.own = own
    with pytest.raises(TracingError, match=r"a layer is given a Blobs, which is neither data .* use_cache: false"):
        trace(model, [], 1, examples=examples_of())


def test_the_class_of_a_module_that_can_not_be_traced_is_named_if_there_are_several() -> None:
    """A refusal named the first one, and the next refusal the second one."""

    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    for several in (False, True):
        model = nn.Sequential(Deciding(), nn.Linear(6, 4), *(Deciding() for _ in range(several)))
        also = r" \(or its class, Deciding, for all of them\)" if several else ""
        with pytest.raises(TracingError, match=f"name the module that holds this line, 0{also}, in model.leaves"):
            trace(model, [], 1, examples=examples_of())


def test_einops_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    einops = ModuleType("einops.einops")

    def reduce(tensor: Any, pattern: str) -> Any:
        if not isinstance(tensor, torch.Tensor):
            raise RuntimeError(f"Tensor type unknown to einops {type(tensor)}")
        return tensor.flip(1)

    def rearrange(net: Net, h: Any) -> Any:
        return einops.reduce(h, "b (c d) -> b (d c)")

    einops.reduce = reduce  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "einops.einops", einops)
    check_traced(traced(rearrange), Blobs())
    assert einops.reduce is reduce


class Drawing(nn.Module):
    """A layer of the user's own, which remembers its calls."""

    one_layer = True
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, 6] with noise."""
        self.calls += 1
        self.mean.add_(x.detach().mean(0))
        return x * self.weight + torch.rand(6)


def test_deciding_changes_and_draws_nothing() -> None:
    own = Drawing()

    def decides(net: Net, h: Any) -> Any:
        h = own(h)
        return net.b(h) if h.dim() == 2 else h

    model = Net(decides)
    model.own = own
    before = torch.default_generator.get_state()
    trace(model, [], 1, examples=examples_of())
    assert torch.equal(torch.default_generator.get_state(), before)
    assert own.calls == 0
    assert not own.mean.any()
    assert own.mean._version == 0


class Activated(nn.BatchNorm1d):
    """timm's: calls the function, since an activation follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, 6], normalised and positive."""
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1
        ).relu()


def test_subclasses_of_batchnorm_are_one_layer() -> None:
    """0.2.0: they were refused, as the change of their statistics isn't recorded."""
    model = nn.Sequential(nn.Linear(6, 6), Activated(6), nn.Linear(6, 4)).double()
    graph = trace(model)
    assert [layer.kind for layer in graph.layers] == ["Linear", "Activated", "Linear"]
    check_traced(graph, Blobs())


@dataclass
class Output:
    """Hugging Face's: with what a graph can't return."""

    loss: Any
    logits: Any
    cache: Any


class Cached(nn.Module):
    """Returns its loss, its output and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        logits = self.b(self.a(x))
        return Output(nn.CrossEntropyLoss()(logits, y), logits, Drawing)


def test_a_cache_beside_the_loss_is_left_out() -> None:
    assert len(trace(Cached(), [], 2).outputs) == 2
