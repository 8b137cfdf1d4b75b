"""Graphs without some cells equal the graph of the model built without them, in training and in evaluation."""

import pytest
import torch
from torch import nn

from pipebench.errors import GraphError
from pipebench.extensions.search.architectures import SkippableCell, find_cells, without
from pipebench.model.graph import LayerGraph, run_node, trace
from pipebench.model.plan import make_plan
from pipebench.model.stage import cut_stage
from pipebench.profile.shapes import output_forms
from tests.support import Blobs


class Residual(nn.Module):
    """x + f(x), with dropout and an in-place ReLU."""

    def __init__(self, width: int, inner: int, plain: bool) -> None:
        super().__init__()
        self.norm = nn.Identity() if plain else nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.0 if plain else 0.5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.drop(self.down(self.relu(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Stack(nn.Module):
    """A stem, residual cells, a head that begins in place; `names` are the cells there are.

    Where it is plain, nothing of it depends on how minibatches are cut, up to rounding.
    """

    def __init__(self, names: str = "abcd", *, plain: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 5)
        self.cells = nn.ModuleDict({name: Residual(5, 3 + ord(name) - ord("a"), plain) for name in names})
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(5, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        scale = x.mean(1, keepdim=True)
        for cell in self.cells.values():
            x = cell(x, scale)
        return self.head(self.relu(x))


def traced(names: str = "abcd") -> tuple[LayerGraph, tuple[SkippableCell, ...]]:
    torch.default_generator.manual_seed(1)
    graph = trace(Stack(names))
    return graph, find_cells(graph, ["cells.*"], output_forms(graph, Blobs(), 4))


def played(graph: LayerGraph, x: torch.Tensor) -> torch.Tensor:
    """Run a graph's layers one after the other."""
    (placeholder,) = graph.graph.find_nodes(op="placeholder")
    env = {placeholder: x}
    for layer in graph.layers:
        if not layer.idle:
            torch.default_generator.manual_seed(len(layer.name))
            env[layer.node] = run_node(graph.root, layer.node, env)
    (output,) = graph.graph.find_nodes(op="output")
    return run_node(graph.root, output, env)


def test_every_cell_is_found_with_its_layers_in_order() -> None:
    graph, cells = traced()
    assert [cell.name for cell in cells] == ["cells.a", "cells.b", "cells.c", "cells.d"]
    for cell in cells:
        kinds = [graph.layers[index].kind for index in cell.layers]
        assert kinds == ["BatchNorm1d", "Linear", "ReLU", "Linear", "Dropout", "mul", "add"]
    assert cells[0].passes == "stem"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("left_out", ["a", "d", "bc", "ad", "abcd", ""])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_without_cells_is_the_model_built_without_them(left_out: str, training: bool) -> None:
    graph, cells = traced()
    idle = [cell for cell in cells if cell.name[-1] in left_out]
    small = Stack("".join(name for name in "abcd" if name not in left_out))
    small.load_state_dict({n: t for n, t in graph.model.state_dict().items() if n in small.state_dict()})
    expected, found = trace(small), without(graph, idle)
    assert len(found.layers) == len(graph.layers)
    if not training:
        expected, found = expected.evaluated, found.evaluated
    active = [layer for layer in found.layers if not layer.idle]
    assert [(layer.kind, layer.parameters) for layer in active] == [
        (layer.kind, layer.parameters) for layer in expected.layers
    ]
    place = {layer.index: position for position, layer in enumerate(active)}
    assert [tuple(place[read] for read in layer.reads) for layer in active] == [e.reads for e in expected.layers]
    assert tuple(place[index] for index in found.outputs) == expected.outputs
    for form in (expected, found):
        for module in form.root.modules():
            module.train(training)
        for drop in (module for module in form.root.modules() if isinstance(module, nn.Dropout)):
            drop.p = 0.0
    x = torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(played(expected, x), played(found, x))


def test_a_stage_holds_its_idle_layers_tensors_separately() -> None:
    graph, cells = traced()
    found = without(graph, cells[1:3])
    cut = cells[2].layers[2]  # in the middle of an idle cell
    plan = make_plan(found, [cut], [1, 1])
    stages = [cut_stage(found, plan, index) for index in (0, 1)]
    assert {*stages[0].idle} | {*stages[1].idle} == {
        name for name in graph.model.state_dict() if name.startswith(("cells.b", "cells.c"))
    }
    assert all(not name.startswith(("cells.b", "cells.c")) for s in stages for name in s.module.state_dict())
    assert stages[0].sends[1] == (graph.index_of("mean"), cells[0].layers[-1])


class Odd(nn.Module):
    """Modules that can't be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.twice = nn.Linear(6, 8), nn.Linear(8, 8)
        self.peeked = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(self.wide(x)))
        inner = self.peeked[0](x)
        return self.head(self.peeked(x) + inner)


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("wide", r"nothing that it is given has the shape of what it puts out, float64 \[4, 8\]"),
        ("twice", "search.cells: twice of the model can't be left out: it is called 2 times"),
        ("peeked.0", "search.cells: peeked.0 of the model can't be left out: it is called 2 times"),
        ("head*", "search.cells: head of the model can't be left out: nothing that it is given has the shape"),
        ("cell.*", "search.cells: no module of the model that is given a value and puts one out is called 'cell"),
        ("peekd", "search.cells: no module .* is called 'peekd'; did you mean 'peeked'"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_left_out_are_refused_with_the_reason(pattern: str, sentence: str) -> None:
    graph = trace(Odd())
    with pytest.raises(GraphError, match=sentence):
        find_cells(graph, [pattern], output_forms(graph, Blobs(), 4))


def test_a_module_whose_inner_values_others_read_is_refused() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.inner(x)
            return self.outer(self.seen)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaky, self.head = Leaky(), nn.Linear(6, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.leaky(x)
            return self.head(x + self.leaky.seen)

    graph = trace(Holder())
    with pytest.raises(GraphError, match="leaky_inner inside it is read by add outside it"):
        find_cells(graph, ["leaky"], output_forms(graph, Blobs(), 4))
