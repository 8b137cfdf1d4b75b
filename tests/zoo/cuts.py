"""Every place to cut a model of the zoo, against the plain model: the check that its layers can be placed anywhere.

The oracle is the uncut module under autograd, which shares no code with tracing or stages.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipebench.engine.replica import Replica, UnitInput
from pipebench.engine.streams import StreamSlot
from pipebench.errors import PlanError
from pipebench.model.graph import LayerGraph, trace
from pipebench.model.plan import Plan, make_plan
from pipebench.model.stage import cut_stage
from pipebench.zoo.registry import Dataset

Fields = dict[str, torch.Tensor]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_every_cut(
    model: nn.Module,
    dataset: Dataset,
    num_samples: int,
    leaves: Sequence[str] = (),
    *,
    every: int = 1,
    apart: int | None = None,
    num_random: int | None = None,
    num_stages: int = 3,
    seed: int = 0,
) -> int:
    """Check in double precision that the model cut into stages computes what the whole model does.

    Compared are the output, the loss, the gradient of every parameter and every buffer (BatchNorm's statistics)
    after one forward and backward of the first `num_samples` training samples. By default every place is tried, one
    at a time: two stages. A try takes about 0.1 s for a hundred layers, hence the ways to try fewer plans.

    Args:
        model: as trained, but without randomness: dropout probabilities are 0. Not changed.
        dataset: feeds the model and gives the loss.
        num_samples: samples of the minibatch.
        leaves: qualified names or class names of modules not traced into.
        every: tries every so manieth place only.
        apart: tries every place, but many in one plan: its cuts are so many layers apart, and so many plans cover all.
        num_random: tries so many random plans of `num_stages` stages instead.
        num_stages: of the random plans.
        seed: of the random plans.

    Returns:
        How many cuts were checked. Plans that part tied parameters are refused and not counted.

    Raises:
        AssertionError: a cut model differs; names the cut.
    """
    model = copy.deepcopy(model).double().train()
    fields = _doubles(dataset.fetch("train", range(num_samples), [*dataset.inputs, *dataset.targets]))
    graph = trace(model, leaves)
    expected = _plain(copy.deepcopy(model), dataset, fields)
    num_layers = len(graph.layers)
    if num_random is not None:
        draw = random.Random(seed)
        places = [sorted(draw.sample(range(1, num_layers), num_stages - 1)) for _ in range(num_random)]
    elif apart is not None:
        places = [list(range(first, num_layers, apart)) for first in range(1, min(apart, num_layers - 1) + 1)]
    else:
        places = [[start] for start in range(1, num_layers, every)]
    checked = 0
    for starts in places:
        try:
            plan = make_plan(graph, starts, [1] * (len(starts) + 1))
        except PlanError as error:
            if "is tied" not in str(error):
                raise
            continue
        found = _cut(graph, plan, dataset, fields)
        _compare(found, expected, f"cut before {', '.join(graph.layers[start].name for start in starts)}")
        checked += len(starts)
    return checked


def _compare(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    for kind in ("loss", "output", "gradients", "buffers"):
        try:
            torch.testing.assert_close(found[kind], expected[kind], rtol=1e-8, atol=1e-10)
        except AssertionError as error:
            raise AssertionError(f"{where}: {kind} differ: {error}") from error


def _doubles(fields: Fields) -> Fields:
    return {name: value.double() if value.is_floating_point() else value for name, value in fields.items()}


def _plain(model: nn.Module, dataset: Dataset, fields: Fields) -> dict[str, Any]:
    """Run the uncut module: forward, loss, `backward()`."""
    output = model(*(fields[name].clone() for name in dataset.inputs))
    loss = dataset.loss(output, fields)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        "loss": loss.detach(),
        "output": [leaf.detach() for leaf in _tensors(output)],
        "gradients": {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


def _cut(graph: LayerGraph, plan: Plan, dataset: Dataset, fields: Fields) -> dict[str, Any]:
    """Run the stages forward one after the other, then backward, passing on the values that cross cuts."""
    replicas = [_replica(graph, plan, index) for index in range(len(plan.stages))]
    values: dict[int, Any] = {}
    seen: list[Any] = []

    def loss_function(output: Any) -> torch.Tensor:
        seen.append(output)
        return dataset.loss(output, fields)

    loss: torch.Tensor | None = None
    for replica in replicas:
        stage = replica.stage
        inputs = [fields[_field(graph, dataset, name)].clone() for name in stage.inputs]
        received = {layer: values[layer] for layers in stage.receives.values() for layer in layers}
        last = loss_function if stage.is_last else None
        place = StreamSlot("train", 0, 0, starts=True)
        given, loss = replica.forward(UnitInput(0, (0, 0), inputs, received, 0, place, loss=last))
        values |= given
    arriving: dict[int, list[torch.Tensor]] = {}
    for replica in reversed(replicas):  # the last reader's gradients come first
        for layer, gradients in replica.backward(0, arriving).items():
            before = arriving.get(layer)
            arriving[layer] = gradients if before is None else [a + b for a, b in zip(before, gradients, strict=True)]
    assert loss is not None
    return {
        "loss": loss,
        "output": [leaf.detach() for leaf in _tensors(seen)],
        "gradients": _merged(graph.root, (each for replica in replicas for each in _gradients(replica))),
        "buffers": dict(each for replica in replicas for each in replica.module.named_buffers()),
    }


def _replica(graph: LayerGraph, plan: Plan, index: int) -> Replica:
    stage = cut_stage(graph, plan, index)
    return Replica(stage, lambda p: torch.optim.SGD(p, 0.0), device=torch.device("cpu"), seed=0)


def _field(graph: LayerGraph, dataset: Dataset, model_input: str) -> str:
    """Return the dataset's field that feeds a model input: fields and inputs go by position."""
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    if len(names) != len(dataset.inputs):
        raise ValueError(f"the model reads {names}, the data set gives {list(dataset.inputs)}")
    return dataset.inputs[names.index(model_input)]


def _gradients(replica: Replica) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter, gradient in zip(
        replica.weights.names, replica.weights.newest.parameters, replica.gradients, strict=True
    ):
        yield name, torch.zeros_like(parameter) if gradient is None else gradient


def _merged(model: nn.Module, found: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return every parameter's gradient; parameters that no layer reads have none."""
    gradients: dict[str, torch.Tensor] = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for name, gradient in found:
        gradients[name] = gradients[name] + gradient
    return gradients


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
