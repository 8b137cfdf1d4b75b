"""One pass through the layer graph, node by node: every forward alone, then every backward alone, last layer first.

The measured and the analytic profile make the same pass with different clocks, on tensors with or without data. A pass
holds no more memory than training does, since with more memory in use the same additions take up to eight times as
long. Where a device can't hold even that, pieces of the model take turns on it, as in activation checkpointing: a first
pass of forwards copies the values that pieces read of each other to the host; then every piece, last one first, repeats
its forwards and runs its backwards.
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
from pipebench.model.precision import lower
from pipebench.model.splitting import splittable
from pipebench.model.values import detached, tensors_in
from pipebench.profile.clocks import Clock, Reading
from pipebench.profile.model import LayerProfile
from pipebench.profile.pieces import Pieces
from pipebench.profile.shapes import without_data
from pipebench.profile.step import LOSS, StepOutput, WalkStep
from pipebench.profile.storages import SavedStorages
from pipebench.recipe.users_code import message_of
from pipebench.zoo.registry import Dataset


class _Cut(torch.autograd.Function):
    """Cuts a value off from the operations that computed it.

    A detached leaf tensor would do so as well, but the graph would keep it, and so the value, alive until the backward.
    """

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
        clock: times each forward and each backward.
        on_layer: called with a layer's index before its forward and before its backward; for passes that are timed.
            Without it the pass also counts the bytes saved for backwards, which slows small layers down.

    Returns:
        One profile per layer, then the loss. Idle layers have neither time nor bytes.

    Raises:
        ProfileError: a layer fails; names it.
    """
    module = root.root if isinstance(root, Pieces) else root
    forget_states(module)  # carried states may be of another number of samples
    walked = _Walk(graph, module, dataset, samples, on_layer)
    whole = range(len(walked.steps))
    try:
        if isinstance(root, Pieces):
            _in_turn(walked, root, clock)
        else:
            walked.forwards(whole, whole.stop, clock)
            walked.backwards(whole, clock)
    finally:  # after an error, too: autograd's graphs would keep memory that Python's collector can't free
        walked.forget(whole)
    return tuple(step.row() for step in walked.steps)


def _in_turn(walked: "_Walk", pieces: Pieces, clock: Clock) -> None:
    """Let pieces take turns: forwards alone from the first to the last, then both, timed, from the last to the first.

    Values that other pieces read, and sums of tied gradients, wait on the host, so that the device holds those of one
    piece only. The first forwards, in order of execution, count what is saved: of several layers that save a storage,
    `saved_with` of each but the first names the one before.
    """
    on_host: dict[fx.Node, Any] = {}
    for piece in pieces.ranges:
        with pieces.on_device(piece) as tensors:
            walked.leave_out(tensors)
            walked.begin_with(on_host, piece, pieces.to_device)
            walked.forwards(piece, len(walked.steps), lambda work: (work(), float))  # untimed: they are repeated
            on_host |= walked.leave(piece, pieces.to_host)
    walked.stop_counting()
    for piece in reversed(pieces.ranges):
        with pieces.on_device(piece):
            walked.begin_with(on_host, piece, pieces.to_device)
            walked.forwards(piece, piece.stop, clock)
            walked.move_sums(piece, pieces.to_device)
            walked.backwards(piece, clock)
            walked.move_sums(piece, pieces.to_host)


def rows_without_costs(graph: LayerGraph) -> tuple[LayerProfile, ...]:
    """Return the rows of a model's layers and of the loss, as in a profile but for seconds and activations."""
    root = without_data(graph.root)
    lower([root], graph.rounding)
    return tuple(step.row() for step in (*_steps(graph, root), WalkStep(LOSS, LOSS, {}, {}, graph.outputs, ())))


def idle_backward_s(device: torch.device, clock: Clock) -> Reading:
    """Time the backward of a layer that computes nothing: the cost of entering and leaving autograd."""
    value = torch.ones(1, device=device, requires_grad=True)
    owner, step = (WalkStep("idle", "idle", {}, {}, (), ()) for _ in range(2))
    read = _cut(value, step, owner)
    like = torch.empty_like(value, device="meta")
    owner.outputs = {0: StepOutput(get_gradient_edge(value), like, device)}
    step.outputs, step.arrived = {0: StepOutput(get_gradient_edge(read), like, device)}, Counter([0])
    _backward(step, clock, {}, ())
    return step.backward_s


class _Walk:
    """One pass, through all layers at once or through one piece after another; the loss is the last step."""

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
        # The node that each step runs: None for idle layers; for the loss the output node, which assembles the
        # model's output.
        self._nodes = [None if layer.idle else layer.node for layer in graph.layers]
        self._nodes += graph.graph.find_nodes(op="output")
        self._owners = {node: step for node, step in zip(self._nodes, self.steps, strict=True) if node is not None}
        # The indices of the steps that read each node's value, ascending.
        self._readers: dict[fx.Node, list[int]] = {node: [] for node in graph.graph.nodes}
        for index, node in enumerate(self._nodes):
            for read in node.all_input_nodes if node is not None else ():
                self._readers[read].append(index)
        uses = Counter(name for step in self.steps for name in step.parameters)
        self._tied = frozenset(name for name, count in uses.items() if count > 1)
        self._sums: dict[str, torch.Tensor] = {}  # by name, the summed gradient of a tied parameter that has one so far

    def forwards(self, piece: range, stop: int, clock: Clock) -> None:
        """Run the forwards of a piece; free each value once no step before the one with index `stop` reads it."""
        for index in piece:
            step, node = self.steps[index], self._nodes[index]
            if node is None:
                continue
            self._tell(index)
            value = _forward(step, self._call(step, node), clock, self._storages, index)
            if self._storages is not None and node.op != "output":
                # Of a buffer that the next minibatch changes a stage sends a copy, which has its own storage.
                step.output_storages = self._storages.storages([cloned(value) if step.runs_once else value])
                step.input_storages = self._storages.storages(
                    self._env[each] for each in node.all_input_nodes if each.op == "placeholder"
                )
            self._env[node] = value
            for each in [*node.all_input_nodes, node]:
                if not any(index < reader < stop for reader in self._readers[each]):
                    self._env.pop(each, None)

    def backwards(self, piece: range, clock: Clock) -> None:
        """Run the backwards of the piece whose forwards have just run, last layer first."""
        for index in reversed(piece):
            step = self.steps[index]
            self._tell(index)
            if step.name == LOSS:
                step.arrived = Counter([*step.outputs])  # a gradient of 1, which no step computes
            _backward(step, clock, self._sums, self._tied)

    def forget(self, piece: range) -> None:
        """Free what a piece's forwards saved for its backwards."""
        for step in self.steps[piece.start : piece.stop]:
            step.forget()
        for node in self._made(piece):
            self._env[node] = detached(self._env[node])

    def leave_out(self, parameters_and_buffers: Iterable[torch.Tensor]) -> None:
        """Don't count the storages of these tensors as saved."""
        if self._storages is not None:
            self._storages.leave_out(parameters_and_buffers)

    def stop_counting(self) -> None:
        """Stop counting saved bytes, and reset carried states for the forwards that follow."""
        self._storages = None
        forget_states(self._root)

    def begin_with(self, left: Mapping[fx.Node, Any], piece: range, copy: Callable[[Any], Any]) -> None:
        """Begin a piece with copies of the values that it reads of earlier pieces; `left` may have later ones', too."""
        before = {*self._nodes[: piece.start]}
        read = {n: v for n, v in left.items() if n in before and any(reader in piece for reader in self._readers[n])}
        self._env = {**self._inputs, **self._copies(read, copy)}

    def leave(self, piece: range, copy: Callable[[Any], Any]) -> dict[fx.Node, Any]:
        """End a piece without its backwards; return copies of the values that later ones read, and hold no others."""
        self.forget(piece)
        copies = self._copies({node: self._env[node] for node in self._made(piece)}, copy)
        self._env = {}
        return copies

    def move_sums(self, piece: range, copy: Callable[[Any], Any]) -> None:
        """Replace the sums of tied gradients to which a piece adds by copies."""
        names = {name for index in piece for name in self.steps[index].parameters}
        self._sums |= {name: copy(total) for name, total in self._sums.items() if name in names}

    def _copies(self, values: Mapping[fx.Node, Any], copy: Callable[[Any], Any]) -> dict[fx.Node, Any]:
        """Return copies of some nodes' values, whose storages count as those of the values."""
        made = {node: copy(value) for node, value in values.items()}
        if self._storages is not None:
            self._storages.note_copies([*values.values()], [*made.values()])
        return made

    def _made(self, piece: range) -> list[fx.Node]:
        """Return the nodes of a piece whose values are still held."""
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
            # autograd refuses to overwrite the view that _Cut returns. A clone is no view; it is made untimed.
            own[first] = cloned(own[first])
        return bind_node(self._root, node, own)


def _steps(graph: LayerGraph, root: nn.Module) -> list[WalkStep]:
    """Return a step per layer, with the tensors of `root` that it uses."""
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
    """Return a layer's buffers by qualified name: tensors of 0 bytes for those that replicas don't average.

    The integer buffers of modules are left out.
    """
    named = {name: attribute(root, name) for name in layer.buffers}
    if layer.node.op == "call_module":
        named = {name: buffer for name, buffer in named.items() if buffer.is_floating_point()}
    return {name: buffer if name in averaged else buffer.new_empty(0) for name, buffer in named.items()}


def _cut(value: Any, step: WalkStep, owner: WalkStep | None) -> Any:
    """Return a value cut off from `owner`, the step that computed it, or None for a model input.

    `step` reads the value: its backward will compute the gradients of those of the value's tensors that have one.
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
    """Time a step's forward and return its value; count the bytes it saves in `saved`, unless that is None."""
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

    The additions of gradients are timed as in training: the layer that made a value adds the gradients of all its
    readers. Of the layers that use a `tied` parameter, the last one's backward comes first and begins the sum in
    `sums`; every other layer adds to it.
    """
    arrived = [(output, step.arrived[index]) for index, output in step.outputs.items() if step.arrived[index]]
    if arrived and step.wanted:
        try:
            found = _timed_gradients(step, arrived, [sums.get(name) for name in step.parameters], clock)
        except Exception as error:
            raise ProfileError(_failed(step, "backward", error), step.name) from error
        for (owner, index), gradient in zip(step.origins, found, strict=False):
            if gradient is not None:
                owner.arrived[index] += 1
        for name in [name for name in step.parameters if name in tied and name not in sums]:
            sums[name] = torch.zeros_like(step.parameters[name])
    step.forget()


def _timed_gradients(
    step: WalkStep, arrived: Sequence[tuple[StepOutput, int]], totals: Sequence[torch.Tensor | None], clock: Clock
) -> Sequence[torch.Tensor | None]:
    """Time a step's backward; return the gradients of its inputs, then of its parameters.

    Args:
        step: its forward has run.
        arrived: its outputs that have gradients, and how many each has, which are added first.
        totals: per parameter, the sum of gradients that its own is added to, if any.
        clock: times the backward and, if it can be split, its weight part alone.
    """
    edges, gradients = [output.edge for output, _ in arrived], [output.gradient() for output, _ in arrived]
    others = [output.gradient() if count > 1 else None for output, count in arrived]

    def backward() -> Sequence[torch.Tensor | None]:
        for gradient, other, (_, count) in zip(gradients, others, arrived, strict=True):
            for _ in range(count - 1):
                assert other is not None
                gradient.add_(other)
        found = torch.autograd.grad(edges, step.wanted, gradients, allow_unused=True)
        for total, gradient in zip(totals, found[len(step.origins) :], strict=True):
            if total is not None and gradient is not None:
                total.add_(gradient)
        return found

    if step.splits and step.origins:
        weights = step.wanted[len(step.origins) :]
        # No name for the gradients: it would keep them beside those of the whole backward.
        step.weight_s = clock(lambda: torch.autograd.grad(edges, weights, gradients, retain_graph=True))[1]
    found: Sequence[torch.Tensor | None]
    found, step.backward_s = clock(backward)
    if step.splits and not step.origins:  # its backward computes weight gradients only
        step.weight_s = step.backward_s
    return found


def _failed(step: WalkStep, what: str, error: Exception) -> str:
    if step.kind == LOSS:
        return f"the loss can't be profiled: {message_of(error)}"
    return f"layer {step.name} ({step.kind}) can't be profiled, its {what} fails: {message_of(error)}"
