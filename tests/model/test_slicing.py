"""Tensor slices: the rule, and slices on threads against the whole model."""

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.errors import GraphError
from pipebench.model.graph import LayerGraph, trace
from pipebench.model.slice_modules import Alone, piece
from pipebench.model.sliced import ProcessSlicer, Slicer, SlicerInTurn
from pipebench.profile.model import LayerProfile
from pipebench.profile.tensor import unit_bytes
from pipebench.zoo.bert import bert_base
from pipebench.zoo.gnmt import gnmt8
from pipebench.zoo.gpt2 import gpt2
from pipebench.zoo.multi_head import Joined
from pipebench.zoo.transformer import transformer
from tests.patience import PATIENCE_S


class Threads:
    """What devices that are threads share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.given: list[torch.Tensor] = [torch.empty(0)] * size


class Member:
    """One of several threads."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.size, self.rank, self.threads = len(threads.given), rank, threads

    def __deepcopy__(self, memo: dict[int, Any]) -> "Member":
        return self

    def gather(self, piece: torch.Tensor, num_features: int) -> torch.Tensor:
        return torch.cat(self.all(piece), -1)

    def all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.threads.given[self.rank] = tensor
        self.threads.barrier.wait()
        found = [*self.threads.given]
        self.threads.barrier.wait()
        return found

    def sum(self, tensor: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        first, *others = self.all(tensor)
        for other in others:
            first = first + other
        return first


def run(graph: LayerGraph, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return outputs and gradients of a traced model."""
    module = torch.fx.GraphModule(graph.root, graph.graph)
    found = module(*inputs)
    outputs = list(found) if isinstance(found, tuple) else [found]
    named = dict(graph.root.named_parameters())
    sum(value.square().sum() for value in outputs).backward()
    gradients = {name: value.grad for name, value in named.items() if value.grad is not None}
    return [value.detach() for value in outputs], gradients


def in_slices(
    model: nn.Module, inputs: list[torch.Tensor], size: int, slicer_of: Callable[[Member], Slicer] = Slicer
) -> list[Any]:
    """Run a model in slices on threads; return each device's outputs and gradients."""
    threads, found = Threads(size), [None] * size
    graphs = [trace(copy.deepcopy(model), rewrite=slicer_of(Member(threads, rank))) for rank in range(size)]

    def work(rank: int) -> None:
        # One thread runs the backward itself, where autograd would give it to a thread of its device.
        found[rank] = run(graphs[rank], inputs)  # type: ignore[call-overload]

    with torch.autograd.set_multithreading_enabled(False):
        workers = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return found


TOKENS = torch.arange(12).view(2, 6) % 11
LENGTHS = torch.tensor([6, 4])
MODELS = {
    "gpt2": (lambda: gpt2(2, 16, 4, 27, 8, dropout=0.0), [TOKENS]),
    "gpt2-few-tokens": (lambda: gpt2(1, 8, 4, 9, 8, dropout=0.0), [TOKENS % 9]),  # none for the last of four devices
    "gpt2-tied": (lambda: gpt2(1, 16, 4, 27, 8, dropout=0.0, share_embedding=True), [TOKENS]),
    "bert": (lambda: bert_base(1, 16, 32, 4, 27, 8, 0.0), [TOKENS, TOKENS % 2, LENGTHS, TOKENS[:, :2] % 6]),
    "transformer": (lambda: transformer(1, 16, 32, 4, 27, 26, 0.0), [TOKENS, LENGTHS, TOKENS]),
    "gnmt": (lambda: gnmt8(16, 27, 25, 0.0), [TOKENS, LENGTHS, TOKENS]),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), [torch.randn(2, 6).double()]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_slices_compute_what_the_whole_model_does(name: str, size: int) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = make().double()  # type: ignore[no-untyped-call]
    whole = copy.deepcopy(model)
    outputs, gradients = run(trace(whole), inputs)
    compare(in_slices(model, inputs, size), outputs, gradients)


def compare(devices: list[Any], outputs: list[torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
    """Compare what devices have put out, and their pieces of the gradients, with the whole model's."""
    for rank, (own_outputs, own_gradients) in enumerate(devices):
        for ours, theirs in zip(own_outputs, outputs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert own_gradients.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            for dimension, (own, all_) in enumerate(zip(own_gradients[parameter].shape, gradient.shape, strict=True)):
                if own != all_:
                    gradient = piece(gradient, dimension, Member(Threads(len(devices)), rank))
            torch.testing.assert_close(own_gradients[parameter], gradient, rtol=1e-9, atol=1e-11)


class Own(nn.Module):
    """A user's model: an embedding, a block of two linear layers, and a product with the vocabulary."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(27, 8, **options)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(8, 27)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        narrow: torch.Tensor = self.narrow(torch.relu(self.wide(x)))
        return narrow

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.block(self.words(tokens)))
        return logits


class OneDropout(Own):
    """Drops pieces and whole values by one module, as most models are written."""

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(x)
        for _ in range(2):
            x = x + self.dropout(self.narrow(self.dropout(torch.relu(self.wide(x)))))
        return x


class TiedByFunction(Own):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.block(self.words(tokens)), self.words.weight)


class Penalised(Own):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.wide.weight.square().sum()


class Unrolled(Own):
    """Calls a matrix twice: for the layer after it, and for the model's output."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        widened: torch.Tensor = self.wide(self.block(self.words(tokens)))
        return widened


class HeadAfterMatrix(Own):
    """Its last matrix could be divided by rows, after the one before, or by columns, with its output gathered."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(torch.relu(self.narrow(self.words(tokens))))
        return logits

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 8)


class Gated(Own):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 16, bias=False).requires_grad_(False)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        narrow: torch.Tensor = self.narrow(nn.functional.silu(self.gate(x)) * self.wide(x) / 2)
        return narrow


class GateOfPieces(Own):
    """Scales a wide value by one number made of it: no matrix but the gate's could read pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 1)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.wide(x))
        narrow: torch.Tensor = self.narrow(wide * torch.sigmoid(self.gate(wide)))
        return narrow


class WideResidual(Own):
    """Adds a wide value and what a matrix makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(16, 16)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        narrow: torch.Tensor = self.narrow(wide + self.square(wide))
        return narrow


OWN: dict[str, Callable[[], Own]] = {
    "plain": Own,
    "one dropout": OneDropout,
    "tied by a function": TiedByFunction,
    "weights in the output": Penalised,
    "one matrix in two roles": Unrolled,
    "gated, a matrix frozen": Gated,
    "a gate of pieces": GateOfPieces,
    "a wide residual": WideResidual,
    "a head after a matrix": HeadAfterMatrix,
    "padding": lambda: Own(padding_idx=20),
    "gradients by frequency": lambda: Own(scale_grad_by_freq=True),
}


def same_for_all(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Drop numbers by their place, as devices do that draw alike."""
    return x * (torch.arange(x.numel()).view(x.shape) * 7919 % 5 != 0) / (1 - p) if training and p else x


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", OWN)
def test_slices_of_a_user_s_model_compute_what_it_does(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the traced model but the model itself; devices as processes have them, and in turn."""
    monkeypatch.setattr(nn.functional, "dropout", same_for_all)
    torch.manual_seed(0)
    model = OWN[name]().double()
    whole, tokens = copy.deepcopy(model), 2 * TOKENS + 1
    output = whole(tokens)
    output.square().sum().backward()
    gradients = {key: value.grad for key, value in whole.named_parameters() if value.grad is not None}
    compare(in_slices(model, [tokens], size, ProcessSlicer), [output.detach()], gradients)
    compare([run(trace(model, rewrite=SlicerInTurn(size)), [tokens])], [output.detach()], gradients)


class OtherEvaluation(Own):
    """In evaluation a matrix's output has another reader, which needs it whole."""

    def block(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.relu(self.wide(x))
        narrow: torch.Tensor = self.narrow(wide)
        return narrow if self.training else narrow + 0 * wide.sum()


@pytest.mark.parametrize("kind", [ProcessSlicer, SlicerInTurn])
def test_a_matrix_that_only_training_could_divide_is_refused(kind: Callable[..., Any]) -> None:
    """Processes evaluated with its initial weights."""
    rewrite = SlicerInTurn(2) if kind is SlicerInTurn else ProcessSlicer(Alone(2))
    with pytest.raises(GraphError, match=r"tensor: got 2, and layer (wide|narrow) is divided in training only"):
        trace(OtherEvaluation().double(), rewrite=rewrite)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_slices_in_turn_compute_what_devices_do(name: str, size: int) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = make().double()  # type: ignore[no-untyped-call]
    (outputs, gradients), *_ = in_slices(model, inputs, size)
    alone = trace(copy.deepcopy(model), rewrite=Slicer(Alone(size)))
    graph = trace(model, rewrite=SlicerInTurn(size))
    assert [layer.name for layer in graph.layers] == [layer.name for layer in alone.layers]
    assert [layer.parameters for layer in graph.layers] == [layer.parameters for layer in alone.layers]
    own_outputs, own_gradients = run(graph, inputs)
    for ours, theirs in zip(own_outputs, outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    for parameter, gradient in own_gradients.items():
        for dimension, (own, all_) in enumerate(zip(gradients[parameter].shape, gradient.shape, strict=True)):
            gradient = gradient if own == all_ else gradient.narrow(dimension, 0, own)
        torch.testing.assert_close(gradient, gradients[parameter], rtol=1e-12, atol=1e-13)


def test_a_matrix_divided_by_rows_adds_pieces_in_the_devices_order() -> None:
    """In single precision sums of three terms differ in another order, and from the whole matrix's."""
    torch.manual_seed(3)
    rows = nn.Linear(96, 40)
    module = trace(nn.Sequential(nn.Linear(5, 96), nn.ReLU(), rows), rewrite=SlicerInTurn(3)).root
    x, weight = torch.randn(7, 96), rows.weight
    first, second, third = (x[:, at : at + 32] @ weight[:, at : at + 32].T for at in (0, 32, 64))
    with torch.no_grad():
        found = module.get_submodule("2")(x)
        torch.testing.assert_close(found, first + second + third + rows.bias, rtol=1e-6, atol=1e-7)
        assert torch.equal(found, (first + second) + third + rows.bias)
        assert not torch.equal(found, first + (second + third) + rows.bias)


class Uncounted(nn.Linear):
    """A projection that puts out heads, but doesn't say how many."""

    one_layer = True
    tensor_role = (None, "heads")


def test_bytes_of_a_block_equal_megatron_s() -> None:
    b, s, h, t = 2, 6, 16, 4
    graph = trace(gpt2(3, h, 4, 10, 8), rewrite=Slicer(Alone(t)))
    kinds = [layer.kind for layer in graph.layers if layer.name.startswith("blocks_1_") or "blocks_1" in layer.name]
    rows = [LayerProfile(kind, kind, 0.0, 0.0, 4 * b * s * h, 4 * b * s * h) for kind in kinds]
    # SC'21, section 3.2: per layer and device 8 b s h (t - 1) / t elements, forward and backward.
    assert unit_bytes(rows, t) == 4 * 8 * b * s * h * (t - 1)


@pytest.mark.parametrize(
    ("model", "size", "sentence"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), 2, "no layer of the model can be sliced"),
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), 4, "layer _0 has 6 features, .* allowed are 1, 2"),
        (gpt2(1, 18, 3, 40, 8), 2, "layer blocks_0_attention_query has 3 heads, .* allowed are 1, 3"),
        (nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), 2, "no layer of the model can be sliced"),
        (nn.Sequential(nn.Linear(4, 8), nn.Softmax(1), nn.Linear(8, 2)), 2, "no layer of the model can be sliced"),
        (nn.Sequential(Uncounted(4, 8), Joined(8, 4)), 2, "layer _0 puts out heads, .* has no attribute num_heads"),
    ],
)
def test_models_that_cannot_be_sliced_are_refused_in_one_sentence(model: nn.Module, size: int, sentence: str) -> None:
    with pytest.raises(GraphError, match=f"got {size}, and .*{sentence}"):
        trace(model, rewrite=Slicer(Alone(size)))


def test_values_read_elsewhere_stay_whole() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.a(x))
            return y + self.b(y)

    with pytest.raises(GraphError, match=re.escape("no layer of the model can be sliced")):
        trace(Residual(), rewrite=Slicer(Alone(2)))
