"""One pass through the layer graph, node by node: every forward alone, then every backward alone, last layer first.

The measured and the analytic profile make the same pass with another clock, on tensors with data or without. It holds
no more memory than training does: with more memory in use the same additions take up to eight times as long. Where a
device can't hold even that, pieces of the model take turns on it, as in activation checkpointing: one pass of forwards
puts what pieces read of each other on the host, then every piece does its forwards again and its backwards.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge
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
from pipebench.profile.pieces import Pieces
from pipebench.profile.step import LOSS, StepOutput, WalkStep
from pipebench.profile.storages import SavedStorages
from pipebench.recipe.users_code import message_of
from pipebench.zoo.registry import Dataset


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
    root: nn.Module | Pieces,
    dataset: Dataset,
    samples: Mapping[str, torch.Tensor],
    clock: Clock,
    on_layer: Callable[[int], None] | None = None,
) -> tuple[LayerProfile, ...]:
    """Run one forward and one backward of every layer and of the loss, each cut off from its neighbours.

    Args:
        graph: the layer graph.
        root: a copy of `graph.root` to run on, whose buffers and carried states change; or pieces of one, which take
            turns on a device that can't hold the whole.
        dataset: gives the loss.
        samples: every input and target of the dataset, on the device.
        clock: times each piece of work.
        on_layer: called with a layer's index before its forward and its backward. The bytes saved for backwards aren't
            counted then, which slows small layers down: a pass that is timed has it.

    Returns:
        One profile per layer, then the loss. Idle layers cost nothing.

    Raises:
        ProfileError: a layer fails; names it.
    """
    module = root.root if isinstance(root, Pieces) else root
    forget_states(module)  # of another number of samples
    walked = _Walk(graph, module, dataset, samples, on_layer)
    whole = range(len(walked.steps))
    try:
        if isinstance(root, Pieces):
            _in_turn(walked, root, clock)
        else:
            walked.forwards(whole, whole.stop, clock)
            walked.backwards(whole, clock)
    finally:  # a pass that ran out of memory leaves none of it to graphs, which Python's collector can't see into
        walked.forget(whole)
    return tuple(step.row() for step in walked.steps)


def _in_turn(walked: "_Walk", pieces: Pieces, clock: Clock) -> None:
    """Let pieces take turns: forwards alone from the first to the last, then both, timed, from the last to the first.

    What pieces read of earlier ones waits on the host. The first forwards count what is saved, since storages of values
    that have been on the host are others.
    """
    on_host: dict[fx.Node, Any] = {}
    for piece in pieces.ranges:
        with pieces.on_device(piece) as tensors:
            walked.note_there(tensors)
            walked.forwards(piece, len(walked.steps), _untimed)
            walked.forget(piece)
            on_host |= {node: pieces.to_host(value) for node, value in walked.read_later(piece).items()}
    walked.stop_counting()
    for piece in reversed(pieces.ranges):
        with pieces.on_device(piece):
            walked.begin_with({node: pieces.to_device(on_host[node]) for node in walked.reads(piece)})
            walked.forwards(piece, piece.stop, clock)
            walked.backwards(piece, clock)


def _untimed(work: Callable[[], Any]) -> tuple[Any, Reading]:
    """Do some work that isn't timed: a clock for forwards that come again."""
    return work(), float


def idle_backward_s(device: torch.device, clock: Clock) -> Reading:
    """Time the backward of a layer that computes nothing: entering and leaving autograd."""
    value = torch.ones(1, device=device, requires_grad=True)
    owner, step = (WalkStep("idle", "idle", {}, {}, (), ()) for _ in range(2))
    read = _cut(value, step, owner)
    like = torch.empty_like(value, device="meta")
    owner.outputs = {0: StepOutput(get_gradient_edge(value), like, device)}
    step.outputs, step.arrived = {0: StepOutput(get_gradient_edge(read), like, device)}, Counter([0])
    _backward(step, clock, {}, ())
    return step.backward_s


class _Walk:
    """One pass, of all layers at once or of a piece after the other; the loss is the last step."""

    def __init__(
        self,
        graph: LayerGraph,
        root: nn.Module,
        dataset: Dataset,
        samples: Mapping[str, torch.Tensor],
        on_layer: Callable[[int], None] | None,
    ) -> None:
        self._root, self._dataset, self._samples, self._on_layer = root, dataset, samples, on_layer
        self._storages = SavedStorages([*root.parameters(), *root.buffers()]) if on_layer is None else None
        loss = WalkStep(LOSS, LOSS, {}, {}, graph.outputs, (), reads_samples=not dataset.targets_apart)
        self.steps = [*_steps(graph, root), loss]
        placeholders = graph.graph.find_nodes(op="placeholder")
        self._inputs = {node: samples[name] for node, name in zip(placeholders, dataset.inputs, strict=True)}
        self._env: dict[fx.Node, Any] = {**self._inputs}
        # What steps run, by index; idle layers nothing, the loss what puts the model's output together.
        self._nodes = [None if layer.idle else layer.node for layer in graph.layers]
        self._nodes += graph.graph.find_nodes(op="output")
        self._owners = {node: step for node, step in zip(self._nodes, self.steps, strict=True) if node is not None}
        self._readers: dict[fx.Node, list[int]] = {node: [] for node in graph.graph.nodes}  # indices, ascending
        for index, node in enumerate(self._nodes):
            for read in node.all_input_nodes if node is not None else ():
                self._readers[read].append(index)
        uses = Counter(name for step in self.steps for name in step.parameters)
        self._tied = frozenset(name for name, count in uses.items() if count > 1)
        self._sums: dict[str, torch.Tensor] = {}  # of the gradients of tied parameters that have one

    def forwards(self, piece: range, stop: int, clock: Clock) -> None:
        """Run the forwards of a piece; what nothing reads before the step with index `stop` is freed."""
        for index in piece:
            step, node = self.steps[index], self._nodes[index]
            if node is None:
                continue
            self._tell(index)
            value = _forward(step, self._call(step, node), clock, self._storages, index)
            if self._storages is not None and node.op != "output":
                # A stage hands on a copy of a buffer that the next minibatch changes: a storage of its own.
                step.puts_out = self._storages.storages([cloned(value) if step.runs_once else value])
                step.takes = self._storages.storages(
                    self._env[each] for each in node.all_input_nodes if each.op == "placeholder"
                )
            self._env[node] = value
            for each in [*node.all_input_nodes, node]:
                if not any(index < reader < stop for reader in self._readers[each]):
                    self._env.pop(each, None)

    def backwards(self, piece: range, clock: Clock) -> None:
        """Run the backwards of a piece, whose forwards ran last, last layer first."""
        for index in reversed(piece):
            step = self.steps[index]
            self._tell(index)
            if step.name == LOSS:
                step.arrived = Counter([*step.outputs])
            _backward(step, clock, self._sums, self._tied)

    def forget(self, piece: range) -> None:
        """Free what a piece's forwards saved for its backwards."""
        for step in self.steps[piece.start : piece.stop]:
            step.forget()
        for node in self._made(piece):
            self._env[node] = tree_map_only(torch.Tensor, _without_graph, self._env[node])

    def note_there(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take storages of parameters and buffers, which are no part of what is saved."""
        if self._storages is not None:
            self._storages.note_there(tensors)

    def stop_counting(self) -> None:
        """Count no more of what is saved, and let carried states begin anew."""
        self._storages = None
        forget_states(self._root)

    def read_later(self, piece: range) -> dict[fx.Node, Any]:
        """Return the values of a piece that later ones read."""
        return {node: self._env[node] for node in self._made(piece)}

    def reads(self, piece: range) -> list[fx.Node]:
        """Return the nodes whose values a piece reads of earlier ones."""
        earlier = [node for node in self._nodes[: piece.start] if node is not None]
        return [node for node in earlier if any(reader in piece for reader in self._readers[node])]

    def begin_with(self, values: Mapping[fx.Node, Any]) -> None:
        """Begin a piece with the values that it reads of others."""
        self._env = {**self._inputs, **values}

    def _made(self, piece: range) -> list[fx.Node]:
        """Return a piece's nodes whose values are there."""
        return [node for node in self._nodes[piece.start : piece.stop] if node is not None and node in self._env]

    def _tell(self, index: int) -> None:
        if self._on_layer is not None:
            self._on_layer(index)

    def _call(self, step: WalkStep, node: fx.Node) -> Callable[[], Any]:
        """Return a step's forward, bound to inputs that are cut off from what computed them."""
        env = self._env
        own = {each: _cut(env[each], step, self._owners.get(each)) for each in node.all_input_nodes if each in env}
        if node.op == "output":
            prediction = run_node(self._root, node, own)
            targets = {name: self._samples[name] for name in self._dataset.targets}
            return lambda: self._dataset.loss(prediction, targets)
        first = node.args[0] if node.args else None
        if is_inplace(self._root, node) and isinstance(first, fx.Node) and first in own:
            # autograd refuses to overwrite a view like this; a clone isn't one, and is made outside the clock.
            own[first] = cloned(own[first])
        return bind_node(self._root, node, own)


def _steps(graph: LayerGraph, root: nn.Module) -> list[WalkStep]:
    parameters = dict(root.named_parameters())
    exact = dict(graph.root.named_parameters()) if graph.rounding else {}
    can_be_split, averaged = {*splittable(root, graph.graph)}, averaged_buffers(graph)
    steps = []
    for layer in graph.layers:
        if layer.idle:
            steps.append(WalkStep(layer.name, layer.kind, {}, {}, (), ()))
            continue
        own = {name: parameters[name] for name in layer.parameters}
        step = WalkStep(layer.name, layer.kind, own, _buffers(layer, root, averaged), layer.reads, layer.inputs)
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


def _cut(value: Any, step: WalkStep, owner: WalkStep | None) -> Any:
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


def _forward(step: WalkStep, call: Callable[[], Any], clock: Clock, saved: "SavedStorages | None", index: int) -> Any:
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
        index: StepOutput(get_gradient_edge(tensor), torch.empty_like(tensor, device="meta"), tensor.device)
        for index, tensor in enumerate(tensors)
        if tensor.requires_grad
    }
    return value


def _backward(step: WalkStep, clock: Clock, sums: dict[str, torch.Tensor], tied: Collection[str]) -> None:
    """Time the step's backward, then release what it saved.

    Gradients that meet are added, as in training: those of a value by the layer that made it, those of a parameter that
    several layers use (`tied`) by all of them but the last, whose backward is the first and begins the sum in `sums`.
    """
    there = [(output, step.arrived[index]) for index, output in step.outputs.items() if step.arrived[index]]
    gradients = [output.gradient() for output, _ in there]
    others = [output.gradient() if count > 1 else None for output, count in there]
    met = [sums.get(name) for name in step.parameters]
    edges = [output.edge for output, _ in there]

    def call() -> Sequence[torch.Tensor | None]:
        for (_, count), gradient, other in zip(there, gradients, others, strict=True):
            for _ in range(count - 1):
                assert other is not None
                gradient.add_(other)
        found = torch.autograd.grad(edges, step.wanted, gradients, allow_unused=True)
        for total, gradient in zip(met, found[len(step.origins) :], strict=True):
            if total is not None and gradient is not None:
                total.add_(gradient)
        return found

    if there and step.wanted:
        try:
            if step.splits and step.origins:
                wanted = step.wanted[len(step.origins) :]
                _, step.weight_s = clock(lambda: torch.autograd.grad(edges, wanted, gradients, retain_graph=True))
            found, step.backward_s = clock(call)
        except Exception as error:
            raise ProfileError(_failed(step, "backward", error), step.name) from error
        for (owner, index), gradient in zip(step.origins, found, strict=False):
            if gradient is not None:
                owner.arrived[index] += 1
        if step.splits and not step.origins:  # it computes nothing else
            step.weight_s = step.backward_s
        for name in [name for name in step.parameters if name in tied and name not in sums]:
            sums[name] = torch.zeros_like(step.parameters[name])
    step.forget()


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor cut off from what computed it, which still has a gradient if it had one."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _failed(step: WalkStep, what: str, error: Exception) -> str:
    if step.kind == LOSS:
        return f"the loss can't be profiled: {message_of(error)}"
    return f"layer {step.name} ({step.kind}) can't be profiled, its {what} fails: {message_of(error)}"
