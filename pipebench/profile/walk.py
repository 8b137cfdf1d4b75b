"""One pass through the layer graph, node by node: every forward alone, then every backward alone, last layer first.

The measured and the analytic profile make the same pass with another clock, on tensors with data or without. It holds
no more memory than training does: with more memory in use the same additions take up to eight times as long.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from pipebench.errors import ProfileError
from pipebench.model.graph import (
    Layer,
    LayerGraph,
    attribute,
    averaged_buffers,
    bind_node,
    cloned,
    forget_states,
    run_node,
)
from pipebench.model.in_place import is_inplace
from pipebench.model.splitting import splittable
from pipebench.model.values import tensors_in
from pipebench.profile.clocks import Clock, Reading
from pipebench.profile.model import LayerProfile
from pipebench.recipe.users_code import message_of
from pipebench.zoo.registry import Dataset

LOSS = "loss"


@dataclass
class _Step:
    """A layer, or the loss, during the pass. Times are read when the pass is over."""

    name: str
    kind: str
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    reads: tuple[int, ...]
    inputs: tuple[str, ...]
    wanted: list[Any] = field(default_factory=list)  # gradient edges: inputs that have a gradient, then parameters
    # For each wanted input, the step that computed it and the tensor's index in its output
    origins: list[tuple["_Step", int]] = field(default_factory=list)
    outputs: dict[int, "_Output"] = field(default_factory=dict)  # index to each output tensor that has a gradient
    forward_s: Reading = float
    backward_s: Reading = float
    splits: bool = False  # whether its backward can be split
    weight_s: Reading = float  # seconds of its backward for gradients of parameters, if it can be split
    output_parts: tuple[int, ...] = ()  # bytes of each tensor of its output
    gradient_bytes: int = 0  # bytes of its output's tensors that have a gradient
    saved_bytes: int = 0  # this and the next four: see `LayerProfile`, storages as number to bytes
    saved_with: Counter[int] = field(default_factory=Counter)
    keeps: dict[int, int] = field(default_factory=dict)
    puts_out: dict[int, int] = field(default_factory=dict)
    takes: dict[int, int] = field(default_factory=dict)
    masters: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the optimizer in fp32, by qualified name
    untrained: Mapping[str, torch.Tensor] = field(default_factory=dict)  # parameters that aren't, and buffers
    runs_once: bool = False
    reads_samples: bool = False


@dataclass
class _Output:
    """An output tensor that has a gradient: its edge, shape (a meta tensor), device, and number of gradients so far."""

    edge: GradientEdge
    like: torch.Tensor
    device: torch.device
    num_arrived: int = 0

    def gradient(self) -> torch.Tensor:
        """Return a gradient to run backward with; its values don't matter."""
        return torch.ones_like(self.like, device=self.device)


class _Cut(torch.autograd.Function):
    """Cuts a value off from the operations that computed it; unlike a leaf tensor it doesn't keep the value alive."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the value, which requires grad because `anchor` does."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Refuse: a backward ends at its layer's inputs."""
        raise AssertionError("a backward went past the layer it is of")


def walk(
    graph: LayerGraph,
    root: nn.Module,
    dataset: Dataset,
    samples: Mapping[str, torch.Tensor],
    clock: Clock,
    on_layer: Callable[[int], None] | None = None,
) -> tuple[LayerProfile, ...]:
    """Run one forward and one backward of every layer and of the loss, each cut off from its neighbours.

    Args:
        graph: the layer graph.
        root: a copy of `graph.root` to run on; its buffers and carried states change.
        dataset: gives the loss.
        samples: every input and target of the dataset, on the device of `root`.
        clock: times each piece of work.
        on_layer: called with a layer's index before its forward and its backward. The bytes saved for backwards aren't
            counted then, which slows small layers down: a pass that is timed has it.

    Returns:
        One profile per layer, then the loss. Idle layers cost nothing.

    Raises:
        ProfileError: a layer fails; names it.
    """
    forget_states(root)  # of another number of samples
    steps = _forwards(graph, root, dataset, samples, clock, on_layer)
    for output in steps[-1].outputs.values():
        output.num_arrived = 1
    uses = Counter(name for step in steps for name in step.parameters)
    sums = {name: torch.zeros_like(p) for step in steps for name, p in step.parameters.items() if uses[name] > 1}
    met: set[str] = set()
    for index, step in reversed([*enumerate(steps)]):
        if on_layer is not None:
            on_layer(index)
        _backward(step, clock, sums, met)
    return tuple(_profile(step) for step in steps)


def idle_backward_s(device: torch.device, clock: Clock) -> Reading:
    """Time the backward of a layer that computes nothing: entering and leaving autograd."""
    value = torch.ones(1, device=device, requires_grad=True)
    owner, step = (_Step("idle", "idle", {}, {}, (), ()) for _ in range(2))
    read = _cut(value, step, owner)
    like = torch.empty_like(value, device="meta")
    owner.outputs = {0: _Output(get_gradient_edge(value), like, device)}
    step.outputs = {0: _Output(get_gradient_edge(read), like, device, num_arrived=1)}
    _backward(step, clock, {}, set())
    return step.backward_s


def _forwards(
    graph: LayerGraph,
    root: nn.Module,
    dataset: Dataset,
    samples: Mapping[str, torch.Tensor],
    clock: Clock,
    on_layer: Callable[[int], None] | None,
) -> list[_Step]:
    placeholders = graph.graph.find_nodes(op="placeholder")
    env: dict[fx.Node, Any] = {node: samples[name] for node, name in zip(placeholders, dataset.inputs, strict=True)}
    storages = _SavedStorages([*root.parameters(), *root.buffers()]) if on_layer is None else None
    unread = {node: len(node.users) for node in graph.graph.nodes}
    owners: dict[fx.Node, _Step] = {}
    steps = _steps(graph, root)
    for layer, step in zip(graph.layers, steps, strict=True):
        if layer.idle:
            continue
        if on_layer is not None:
            on_layer(layer.index)
        env[layer.node] = _forward(step, _call_of(layer, root, env, owners, step), clock, storages, layer.index)
        if storages is not None:
            # A stage hands on a copy of a buffer that the next minibatch changes: a storage of its own.
            copied = [cloned(env[layer.node])] if layer.runs_once else [env[layer.node]]
            step.puts_out = storages.storages(copied)
            step.takes = storages.storages(env[node] for node in layer.node.all_input_nodes if node.op == "placeholder")
        owners[layer.node] = step
        for node in layer.node.all_input_nodes:
            unread[node] -= 1
            if not unread[node]:
                env.pop(node, None)
    (output,) = graph.graph.find_nodes(op="output")
    loss = _Step(LOSS, LOSS, {}, {}, graph.outputs, (), reads_samples=not dataset.targets_apart)
    prediction = run_node(root, output, {node: _cut(value, loss, owners.get(node)) for node, value in env.items()})
    env.clear()
    targets = {name: samples[name] for name in dataset.targets}
    _forward(loss, lambda: dataset.loss(prediction, targets), clock, storages, len(steps))
    return [*steps, loss]


def _steps(graph: LayerGraph, root: nn.Module) -> list[_Step]:
    parameters = dict(root.named_parameters())
    exact = dict(graph.root.named_parameters()) if graph.rounding else {}
    can_be_split, averaged = {*splittable(root, graph.graph)}, averaged_buffers(graph)
    steps = []
    for layer in graph.layers:
        if layer.idle:
            steps.append(_Step(layer.name, layer.kind, {}, {}, (), ()))
            continue
        own = {name: parameters[name] for name in layer.parameters}
        step = _Step(layer.name, layer.kind, own, _buffers(layer, root, averaged), layer.reads, layer.inputs)
        step.splits = layer.node.op == "call_module" and str(layer.node.target) in can_be_split
        step.runs_once = layer.runs_once
        step.masters = {name: exact[name] for name in own if name in exact}
        step.untrained = {name: attribute(root, name) for name in layer.untrained}
        steps.append(step)
    return steps


def _buffers(layer: Layer, root: nn.Module, averaged: Collection[str]) -> dict[str, torch.Tensor]:
    """Return a layer's averaged buffers by qualified name; of others empty tensors, of a module's integers nothing."""
    named = {name: attribute(root, name) for name in layer.buffers}
    if layer.node.op == "call_module":
        named = {name: buffer for name, buffer in named.items() if buffer.is_floating_point()}
    return {name: buffer if name in averaged else buffer.new_empty(0) for name, buffer in named.items()}


def _call_of(
    layer: Layer, root: nn.Module, env: Mapping[fx.Node, Any], owners: Mapping[fx.Node, _Step], step: _Step
) -> Callable[[], Any]:
    """Return the layer's forward, bound to inputs that are cut off from what computed them."""
    own = {node: _cut(env[node], step, owners.get(node)) for node in layer.node.all_input_nodes if node in env}
    first = layer.node.args[0] if layer.node.args else None
    if is_inplace(root, layer.node) and isinstance(first, fx.Node) and first in own:
        # autograd refuses to overwrite a view like this; a clone isn't one, and is made outside the clock.
        own[first] = cloned(own[first])
    return bind_node(root, layer.node, own)


def _cut(value: Any, step: _Step, owner: _Step | None) -> Any:
    """Return a value cut off from `owner`, the step that computed it, or None for a model input.

    Its tensors that have a gradient become wanted by `step`, the reader.
    """
    position = itertools.count()

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        index = next(position)
        if not tensor.requires_grad or owner is None:
            return tensor.detach()
        made: torch.Tensor = _Cut.apply(torch.empty(0, requires_grad=True), tensor.detach())
        step.wanted.append(get_gradient_edge(made))
        step.origins.append((owner, index))
        return made

    return tree_map_only(torch.Tensor, cut, value)


def _forward(step: _Step, call: Callable[[], Any], clock: Clock, saved: "_SavedStorages | None", index: int) -> Any:
    """Time the step's forward; count the bytes it saves for its backward in `saved`, unless that is None."""
    try:
        with saved.counted(step, index) if saved is not None else nullcontext():
            value, step.forward_s = clock(call)
    except Exception as error:  # any module of the user's may raise anything
        raise ProfileError(_failed(step, "forward", error), step.name) from error
    step.wanted += step.parameters.values()
    tensors = tensors_in(value)
    step.output_parts = tuple(tensor.nbytes for tensor in tensors)
    step.gradient_bytes = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
    step.outputs = {
        index: _Output(get_gradient_edge(tensor), torch.empty_like(tensor, device="meta"), tensor.device)
        for index, tensor in enumerate(tensors)
        if tensor.requires_grad
    }
    return value


class _SavedStorages:
    """Numbers storages and notes the last step that saves each; None for those of parameters and buffers, `there`."""

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        self._holders: dict[int, int | None] = {tensor.untyped_storage()._cdata: None for tensor in there}
        self._numbers: dict[int, int] = {}
        self._known: list[StorageWeakRef] = []  # while these are here nothing else has their addresses

    def storages(self, values: Iterable[Any]) -> dict[int, int]:
        """Return number to bytes of the storages of the values' tensors, but parameters and buffers."""
        found = (tensor.untyped_storage() for tensor in tensors_in([*values]))
        return {self._number(each): each.nbytes() for each in found if self._holders.get(each._cdata, -1) is not None}

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._numbers)
            self._known.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return self._numbers[storage._cdata]

    def counted(self, step: _Step, index: int) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context that counts what the forward of the step with this index saves."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            holder = self._holders.setdefault(storage._cdata, -1)
            if holder is None or holder == index:
                return tensor
            step.keeps[self._number(storage)] = storage.nbytes()
            if holder < 0:
                step.saved_bytes += storage.nbytes()
            else:
                step.saved_with[holder] += storage.nbytes()
            self._holders[storage._cdata] = index
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _backward(step: _Step, clock: Clock, sums: Mapping[str, torch.Tensor], met: set[str]) -> None:
    """Time the step's backward, then release what it saved.

    Gradients that meet are added, as in training: those of a value by the layer that made it, those of a parameter that
    several layers use (in `sums`) by all of them but the last, which is the first to add to `met`.
    """
    outputs = [output for output in step.outputs.values() if output.num_arrived]
    gradients = [output.gradient() for output in outputs]
    others = [output.gradient() if output.num_arrived > 1 else None for output in outputs]
    tied = [name if name in sums else None for name in step.parameters]
    edges = [output.edge for output in outputs]

    def call() -> Sequence[torch.Tensor | None]:
        for output, gradient, other in zip(outputs, gradients, others, strict=True):
            for _ in range(output.num_arrived - 1):
                assert other is not None
                gradient.add_(other)
        found = torch.autograd.grad(edges, step.wanted, gradients, allow_unused=True)
        for name, gradient in zip(tied, found[len(step.origins) :], strict=True):
            if name in met and gradient is not None:
                sums[name].add_(gradient)
        return found

    if outputs and step.wanted:
        try:
            if step.splits and step.origins:
                wanted = step.wanted[len(step.origins) :]
                _, step.weight_s = clock(lambda: torch.autograd.grad(edges, wanted, gradients, retain_graph=True))
            found, step.backward_s = clock(call)
        except Exception as error:
            raise ProfileError(_failed(step, "backward", error), step.name) from error
        for (owner, index), gradient in zip(step.origins, found, strict=False):
            if gradient is not None:
                owner.outputs[index].num_arrived += 1
        if step.splits and not step.origins:  # it computes nothing else
            step.weight_s = step.backward_s
        met.update(name for name in tied if name is not None)
    step.wanted, step.origins, step.outputs = [], [], {}


def _profile(step: _Step) -> LayerProfile:
    backward_s = step.backward_s()
    return LayerProfile(
        name=step.name,
        kind=step.kind,
        forward_s=step.forward_s(),
        backward_s=backward_s,
        weight_s=min(step.weight_s(), backward_s),
        output_bytes=sum(step.output_parts),
        gradient_bytes=step.gradient_bytes,
        reads=step.reads,
        inputs=step.inputs,
        parameter_sizes={name: parameter.nbytes for name, parameter in step.parameters.items()},
        buffer_sizes={name: buffer.nbytes for name, buffer in step.buffers.items()},
        saved_bytes=step.saved_bytes,
        master_sizes={name: master.nbytes for name, master in step.masters.items()},
        untrained_sizes={name: tensor.nbytes for name, tensor in step.untrained.items()},
        output_parts=step.output_parts if len(step.output_parts) > 1 else (),
        saved_with=tuple(sorted(step.saved_with.items())),
        keeps=tuple(step.keeps.items()),
        puts_out=tuple(step.puts_out.items()),
        takes=tuple(step.takes.items()),
        runs_once=step.runs_once,
        reads_samples=step.reads_samples,
    )


def _failed(step: _Step, what: str, error: Exception) -> str:
    if step.kind == LOSS:
        return f"the loss can't be profiled: {message_of(error)}"
    return f"layer {step.name} ({step.kind}) can't be profiled, its {what} fails: {message_of(error)}"
