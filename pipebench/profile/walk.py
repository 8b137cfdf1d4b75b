"""One pass through the layer graph, node by node: every forward alone, then every backward alone, last layer first.

Both profiles make this pass, on tensors with data or without; they differ in the clock they hold beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipebench.errors import ProfileError
from pipebench.graph import Layer, LayerGraph, is_inplace, run_node
from pipebench.profile.model import LayerProfile
from zoo.registry import Dataset

LOSS = "loss"
Reading = Callable[[], float]
# Does some work; returns its result, and a way to read its seconds once the whole pass is over.
Clock = Callable[[Callable[[], Any]], tuple[Any, Reading]]


@dataclass
class _Step:
    """A layer, or the loss, on its way through the pass.

    Attributes:
        name: the layer's name.
        kind: the layer's kind.
        parameters: the parameters it trains.
        wanted: tensors its backward computes gradients of: parameters, and inputs that have one.
        values: every tensor of its output.
        forward_s: reads the seconds of its forward.
        backward_s: reads the seconds of its backward.
        output_bytes: bytes of its output.
        gradient_bytes: bytes of the part of it that has a gradient.
    """

    name: str
    kind: str
    parameters: Sequence[torch.Tensor]
    wanted: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    forward_s: Reading = float
    backward_s: Reading = float
    output_bytes: int = 0
    gradient_bytes: int = 0


def walk(
    graph: LayerGraph, root: nn.Module, dataset: Dataset, samples: Mapping[str, torch.Tensor], clock: Clock
) -> tuple[LayerProfile, ...]:
    """Run one forward and one backward of every layer and of the loss, each cut off from its neighbours.

    Args:
        graph: the layer graph.
        root: a copy of `graph.root` to run on; its buffers change.
        dataset: gives the loss.
        samples: every input and target of the dataset, on the device of `root`.
        clock: times each piece of work.

    Returns:
        One profile per layer, then the loss.

    Raises:
        ProfileError: a layer fails; names it.
    """
    steps = _forwards(graph, root, dataset, samples, clock)
    for step in reversed(steps):
        _backward(step, clock)
    return tuple(_profile(step) for step in steps)


def _forwards(
    graph: LayerGraph, root: nn.Module, dataset: Dataset, samples: Mapping[str, torch.Tensor], clock: Clock
) -> list[_Step]:
    placeholders = graph.graph.find_nodes(op="placeholder")
    env: dict[fx.Node, Any] = {node: samples[name] for node, name in zip(placeholders, dataset.inputs, strict=True)}
    parameters = dict(root.named_parameters())
    steps = []
    for layer in graph.layers:
        step = _Step(layer.name, layer.kind, [parameters[name] for name in layer.parameters])
        env[layer.node] = _forward(step, _call_of(layer, root, env, step), clock)
        steps.append(step)
    (output,) = graph.graph.find_nodes(op="output")
    loss = _Step(LOSS, LOSS, ())
    prediction = _leaves(run_node(root, output, env), loss)
    targets = {name: samples[name] for name in dataset.targets}
    _forward(loss, lambda: dataset.loss(prediction, targets), clock)
    return [*steps, loss]


def _call_of(layer: Layer, root: nn.Module, env: Mapping[fx.Node, Any], step: _Step) -> Callable[[], Any]:
    """Return the layer's forward on inputs of its own."""
    own = {node: _leaves(env[node], step) for node in layer.node.all_input_nodes if node in env}
    first = layer.node.args[0] if layer.node.args else None
    if is_inplace(root, layer.node) and isinstance(first, fx.Node) and first in own:
        # autograd refuses to overwrite a leaf; a clone isn't one, and is made outside the clock.
        own[first] = tree_map_only(torch.Tensor, torch.clone, own[first])
    return lambda: run_node(root, layer.node, own)


def _leaves(value: Any, step: _Step) -> Any:
    """Return a value cut off from what computed it; its tensors that have a gradient become wanted by the step."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        cut = tensor.detach().requires_grad_(tensor.requires_grad)
        if cut.requires_grad:
            step.wanted.append(cut)
        return cut

    return tree_map_only(torch.Tensor, leaf, value)


def _forward(step: _Step, call: Callable[[], Any], clock: Clock) -> Any:
    try:
        value, step.forward_s = clock(call)
    except Exception as error:  # any module of the user's may raise anything
        raise ProfileError(_failed(step, "forward", error)) from error
    step.wanted += step.parameters
    step.values = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    step.output_bytes = sum(tensor.nbytes for tensor in step.values)
    step.gradient_bytes = sum(tensor.nbytes for tensor in step.values if tensor.requires_grad)
    return value


def _backward(step: _Step, clock: Clock) -> None:
    """Run the step's backward, then let go of its tensors."""
    outputs = [tensor for tensor in step.values if tensor.requires_grad]
    gradients = [torch.ones_like(tensor) for tensor in outputs]

    def call() -> None:
        torch.autograd.grad(outputs, step.wanted, gradients, allow_unused=True)

    if outputs and step.wanted:
        try:
            _, step.backward_s = clock(call)
        except Exception as error:
            raise ProfileError(_failed(step, "backward", error)) from error
    step.wanted, step.values = [], []


def _profile(step: _Step) -> LayerProfile:
    return LayerProfile(
        name=step.name,
        kind=step.kind,
        forward_s=step.forward_s(),
        backward_s=step.backward_s(),
        output_bytes=step.output_bytes,
        gradient_bytes=step.gradient_bytes,
        parameter_bytes=sum(parameter.nbytes for parameter in step.parameters),
    )


def _failed(step: _Step, what: str, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    return f"layer {step.name} ({step.kind}) can't be profiled, its {what} fails: {type(error).__name__}: {reason}"
