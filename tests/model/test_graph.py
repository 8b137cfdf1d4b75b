"""Tracing and cutting: the cut model computes what the whole one does, at every cut."""

import copy
import itertools
import random

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional

from pipebench.engine.gradients import Gradients, add
from pipebench.engine.replica import Replica, UnitInput
from pipebench.errors import GraphError, PlanError
from pipebench.model.graph import LayerGraph, trace
from pipebench.model.plan import Plan, make_plan
from pipebench.model.stage import cut_stage
from tests.models import Branching, ConvNet, DropoutTwice, FunctionalDropout, SkipNet, Tied


def whole(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model)
    loss = functional.cross_entropy(model(x), target, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cut(graph: LayerGraph, plan: Plan, x: torch.Tensor, target: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Run a cut model forward and backward stage by stage, by hand."""
    replicas = [
        Replica(cut_stage(graph, plan, i), lambda p: torch.optim.SGD(p, 0.1), device=torch.device("cpu"), seed=0)
        for i in range(len(plan.stages))
    ]
    values: dict[int, object] = {}
    loss = None
    for replica in replicas:
        stage = replica.stage
        received = {layer: values[layer] for layers in stage.receives.values() for layer in layers}
        head = (lambda o: functional.cross_entropy(o, target, reduction="sum")) if stage.is_last else None
        out, loss = replica.forward(UnitInput(0, (0, 0), [x for _ in stage.inputs], received, 0, loss=head))
        values.update(out)
    gradients: Gradients = {}
    for replica in reversed(replicas):
        add(gradients, replica.backward(0, gradients))
    assert loss is not None
    found = {n: g for r in replicas for n, g in zip(r.weights.names, r.gradients, strict=True) if g is not None}
    return loss.item(), found


def assert_same(one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-13)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(other[1][name], gradient, rtol=1e-11, atol=1e-13)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("again", [0.0, 1.0, 0.5])
def test_skip_connections_at_pairs_of_cuts(again: float) -> None:
    draw = random.Random(0)
    graph = trace(SkipNet())
    x, target = torch.randn(5, 6, dtype=torch.float64), torch.randint(4, (5,))
    expected = whole(SkipNet(), x, target)
    pairs = list(itertools.combinations(range(1, len(graph.layers)), 2))
    assert len(pairs) > 100
    for starts in draw.sample(pairs, 40):
        memory = ["recompute" if draw.random() < again else "keep" for _ in graph.layers]
        plan = make_plan(graph, starts, [1, 1, 1], memory=memory)
        assert_same(expected, cut(graph, plan, x, target))


def test_in_place_heads_and_batchnorm_at_every_cut() -> None:
    model = ConvNet().double()
    graph = trace(model)
    x, target = torch.randn(4, 2, 8, 8, dtype=torch.float64), torch.randint(4, (4,))
    expected = whole(model, x, target)
    for start in range(1, len(graph.layers)):
        assert_same(expected, cut(graph, make_plan(graph, [start], [1, 1]), x, target))


def test_every_layer_as_a_stage() -> None:
    graph = trace(SkipNet())
    x, target = torch.randn(5, 6, dtype=torch.float64), torch.randint(4, (5,))
    n = len(graph.layers)
    assert_same(whole(SkipNet(), x, target), cut(graph, make_plan(graph, range(1, n), [1] * n), x, target))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("start", [1, 20, 50, 100, 150, 173])
def test_resnet50_is_cut_anywhere(start: int) -> None:
    torch.default_generator.manual_seed(0)
    model = torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, [3, 4, 6, 3], num_classes=4, width_per_group=4
    ).double()
    for parameter in model.parameters():
        parameter.requires_grad_()
    graph = trace(model)
    assert len(graph.layers) == 175
    x, target = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.randint(4, (2,))
    assert_same(whole(model, x, target), cut(graph, make_plan(graph, [start], [1, 1]), x, target))


def test_a_value_crosses_once_to_each_stage_that_needs_it() -> None:
    graph = trace(SkipNet())
    names = [layer.name for layer in graph.layers]
    relu, cat, c = names.index("relu"), names.index("cat"), names.index("c")
    plan = make_plan(graph, [relu + 1, cat + 1, c], [1, 1, 1, 1])
    assert all(len(set(values)) == len(values) for values in plan.crossings.values())
    # `first`, overwritten in place by relu, is read as relu's output by stages 1 and 3; `hidden` by 1 and 2
    assert relu in plan.crossings[0, 1]
    assert relu in plan.crossings[0, 2]
    assert relu in plan.crossings[0, 3]


def test_the_model_itself_is_unchanged() -> None:
    model = ConvNet()
    before = [module.inplace for module in model.modules() if hasattr(module, "inplace")]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    graph = trace(model)
    cut(graph, make_plan(graph, [3], [1, 1]), torch.randn(4, 2, 8, 8), torch.randint(4, (4,)))
    assert [module.inplace for module in model.modules() if hasattr(module, "inplace")] == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_models_that_cannot_be_traced_are_refused_with_line_and_advice() -> None:
    with pytest.raises(
        GraphError, match=r"Branching can't be traced.*models.py:\d+ \(if x.sum\(\) > 0:\).*model.leaves"
    ):
        trace(Branching())
    assert [layer.kind for layer in trace(Branching(), ["inner"]).layers] == ["BranchingInner"]
    assert [layer.kind for layer in trace(Branching(), ["BranchingInner"]).layers] == ["BranchingInner"]


def test_tied_parameters_stay_together() -> None:
    graph = trace(Tied())
    with pytest.raises(PlanError, match=r"one.weight is tied: layers one, two .* stages \[0, 1\]"):
        make_plan(graph, [1], [1, 1])
    assert make_plan(graph, [3], [1, 1]).replicas == (1, 1)


def test_functional_dropout_follows_train_and_eval() -> None:
    graph = trace(FunctionalDropout())
    assert [layer.kind for layer in graph.layers] == ["Linear", "dropout", "dropout", "Linear"]
    assert graph.evaluation is not None
    assert graph.evaluation.evaluation_map == (0, 1, 2, 3)
    x = torch.ones(3, 6)
    assert torch.equal(graph.evaluation.root(x), graph.evaluation.root(x))
    assert not torch.equal(graph.root(x), graph.root(x))


def test_each_call_of_a_random_module_draws_for_itself() -> None:
    graph = trace(DropoutTwice())
    stage = cut_stage(graph, make_plan(graph, [], [1]), 0)
    assert stage.random == ("drop", "drop_call_2")
    replica = Replica(stage, lambda p: torch.optim.SGD(p, 0.1), device=torch.device("cpu"), seed=0)
    stage.seeder.draw = (0, 0)
    first, second = replica.module(torch.ones(40))[-1]
    assert not torch.equal(first, second)
    assert torch.equal(replica.module(torch.ones(40))[-1][0], first)


class Block(nn.Module):
    """Declares that it is one layer; inside, it branches on a size and draws."""

    one_layer = True

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 6]."""
        return self.drop(self.linear(x)) if x.shape[0] else x


class Noise(nn.Module):
    """Draws without any module of torch's own."""

    one_layer = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 6]."""
        return x + torch.randn(x.shape, dtype=x.dtype) if self.training else x


class Declaring(nn.Module):
    """Contains both, and one of torch's leaves that draws inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.block, self.noise, self.head = Block(), Noise(), nn.Linear(6, 4)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        x = self.noise(self.block(x))
        return self.head(self.encoder(x.unsqueeze(1)).squeeze(1))


def test_modules_may_declare_that_they_are_one_layer_or_random() -> None:
    graph = trace(Declaring())
    assert [layer.kind for layer in graph.layers] == [
        "Block", "Noise", "unsqueeze", "TransformerEncoderLayer", "squeeze", "Linear",
    ]  # fmt: skip
    plan = make_plan(graph, [2], [1, 1])
    assert [cut_stage(graph, plan, index).random for index in (0, 1)] == [("block", "noise"), ("encoder",)]


def test_draws_inside_layers_are_the_same_however_the_model_is_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    target = torch.randint(4, (5,), generator=generator)
    graph = trace(Declaring())
    reference = cut(graph, make_plan(graph, [], [1]), x, target)
    assert_same(reference, cut(graph, make_plan(graph, [], [1]), x, target))
    for start in range(1, len(graph.layers)):
        torch.default_generator.manual_seed(start)  # whatever was drawn before
        assert_same(reference, cut(graph, make_plan(graph, [start], [1, 1]), x, target))
        assert_same(reference, cut(graph, make_plan(graph, [start], [1, 1], memory="recompute"), x, target))
