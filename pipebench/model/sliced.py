"""Divides a traced model's layers among k devices: the same graph, with pieces of its matrices and what joins them.

In one process, which the virtual engine trains in, every device's piece is computed in turn. Modules then keep the
model's own parameters whole, so optimizers, norms, versions and checkpoints are those of the whole model. What differs
from it is the rounding of sums of k partial products, as on k devices.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from pipebench.errors import GraphError
from pipebench.model.graph import DRAWS_AS, draw_name, is_random
from pipebench.model.slice_modules import (
    Alone,
    CopiedToSlices,
    Cut,
    DropoutSlices,
    EmbeddingSlices,
    GatheredSlices,
    SliceGroup,
    SummedSlices,
    cut_of,
    narrowed,
    piece,
    with_parameters,
)
from pipebench.model.slicing import DIMENSION, FEATURES, Slicing, find_slices


class Slicer:
    """Divides the graphs of a model, in training and in evaluation, for one device of a group; they share pieces."""

    def __init__(self, group: SliceGroup, *, in_processes: bool = False) -> None:
        self._group, self._in_processes = group, in_processes
        self.cuts: dict[str, Cut] = {}  # of divided parameters, by their names in the graphs
        self._pieces: dict[int, nn.Parameter] = {}  # by the whole parameter's id
        self._modules: dict[int, nn.Module] = {}  # by the whole module's id
        self._wholes: list[nn.Module] = []  # alive, so that no other module gets their ids

    def __call__(self, module: fx.GraphModule) -> None:
        """Divide a graph in place.

        Raises:
            GraphError: nothing can be divided, or features or heads don't divide; or, in processes, a function draws.
        """
        found = find_slices(module, self._group.size)
        calls = {str(node.target): (node, dimension) for node, dimension in found.divided.items()}
        for path, (node, dimension) in calls.items():
            whole = module.get_submodule(path)
            self._wholes.append(whole)
            if id(whole) not in self._modules:
                self._modules[id(whole)] = self._divided(whole, node, dimension, found)
            module.set_submodule(path, self._modules[id(whole)])
            self._note_cuts(path, whole, dimension)
        self._treat_alone(module, found)
        self._copy_inputs(module, [*found.columns, *found.gathered])
        module.graph.lint()
        module.recompile()

    def _divided(self, whole: nn.Module, node: fx.Node, dimension: int, found: Slicing) -> nn.Module:
        """Return what a device has of a module, whose weight is divided in a dimension."""
        parameters = dict(whole._parameters)
        for name, parameter in whole.named_parameters(recurse=False):
            if parameter.dim() > dimension:  # a row's bias stays whole
                parameters[name] = self._piece(parameter, dimension)
        if isinstance(whole, nn.Embedding):
            return EmbeddingSlices(with_parameters(whole, **parameters), self._group, whole.num_embeddings)  # type: ignore[arg-type]
        assert isinstance(whole, nn.Linear)
        kind = found.columns.get(node, FEATURES)
        own = with_parameters(narrowed(whole, kind, self._group.size), **parameters)
        assert isinstance(own, nn.Linear)
        if node in found.rows:
            return SummedSlices(own, self._group)
        return own if node in found.columns else GatheredSlices(own, self._group, whole.out_features)

    def _treat_alone(self, module: fx.GraphModule, found: Slicing) -> None:
        """Refuse functions that draw random numbers for pieces: processes would draw others than for the whole."""
        for node in found.alone if self._in_processes else ():
            if node.op == "call_function" and is_random(module, node):
                function = getattr(node.target, "__name__", node.target)
                raise GraphError(
                    f"parallelism.tensor: got {self._group.size}, and layer {node.name} draws random numbers for "
                    f"pieces by the function {function}: allowed in processes is a module, nn.Dropout"
                )

    def _note_cuts(self, path: str, whole: nn.Module, dimension: int) -> None:
        for name, parameter in whole.named_parameters(recurse=False):
            if parameter.dim() > dimension:
                self.cuts[f"{path}.{name}"] = cut_of(parameter, dimension, self._group)

    def _piece(self, parameter: nn.Parameter, dimension: int) -> nn.Parameter:
        if id(parameter) not in self._pieces:
            own = piece(parameter.detach(), dimension, self._group).clone()
            self._pieces[id(parameter)] = nn.Parameter(own, parameter.requires_grad)
        return self._pieces[id(parameter)]

    def _copied(self) -> nn.Module:
        """Return what stands before what is divided by columns."""
        return CopiedToSlices(self._group)

    def _copy_inputs(self, module: fx.GraphModule, columns: Sequence[fx.Node]) -> None:
        """Let what is divided by columns read copies, one of each value."""
        order = {node: index for index, node in enumerate(module.graph.nodes)}
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node in sorted(columns, key=order.__getitem__):
            readers.setdefault(node.all_input_nodes[0], []).append(node)
        for value, own in readers.items():
            path = f"{value.name}_to_slices"
            module.add_submodule(path, self._copied())
            with module.graph.inserting_before(own[0]):
                copied = module.graph.call_module(path, (value,))
            for node in own:
                node.replace_input_with(value, copied)


class ProcessSlicer(Slicer):
    """Divides layers for a process that trains: dropout draws what it does of the whole."""

    def __init__(self, group: SliceGroup) -> None:
        super().__init__(group, in_processes=True)

    def _treat_alone(self, module: fx.GraphModule, found: Slicing) -> None:
        """Give pieces dropout of their own: the model's module may drop whole values elsewhere."""
        super()._treat_alone(module, found)
        for node in module.graph.find_nodes(op="call_module"):
            node.meta[DRAWS_AS] = draw_name(module, node)  # before targets, which it goes by, change
        for node, kind in found.alone.items():
            path = str(node.target)
            if node.op == "call_module" and isinstance(whole := module.get_submodule(path), nn.Dropout):
                node.target = f"{path}_of_{kind}"
                module.add_submodule(node.target, DropoutSlices(whole, DIMENSION[kind], self._group))


class SlicerInTurn(Slicer):
    """Divides a traced model's layers into k pieces each, all computed here; the graph is that of one device."""

    def __init__(self, num_slices: int) -> None:
        super().__init__(Alone(num_slices))
        self._num_slices = num_slices

    def _divided(self, whole: nn.Module, node: fx.Node, dimension: int, found: Slicing) -> nn.Module:
        """Return a module that computes all pieces."""
        if isinstance(whole, nn.Embedding):
            return whole  # others' pieces add zeros
        assert isinstance(whole, nn.Linear)
        if node in found.rows:
            return RowsInTurn(whole, found.rows[node], self._num_slices)
        return ColumnsInTurn(whole, found.columns.get(node, FEATURES), self._num_slices)

    def _copied(self) -> nn.Module:
        return CopiesInTurn(self._num_slices)


class _Copies(torch.autograd.Function):
    """Hands a value on to all devices; its gradient is the sum of theirs, in their order."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, num_slices: int) -> torch.Tensor:
        return value.expand(num_slices, *value.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return reduce(torch.add, gradient.unbind()), None


class _Piece(torch.autograd.Function):
    """Hands on what one device puts out; its gradient lies in memory as there, so that kernels add in one order."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.contiguous()


class CopiesInTurn(nn.Module):
    """Stands before what is divided by columns: each device's matrices read, and add gradients to, its own copy."""

    one_layer = True

    def __init__(self, num_slices: int) -> None:
        super().__init__()
        self._num_slices = num_slices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x for every device: [devices, ...], without memory of their own."""
        y: torch.Tensor = _Copies.apply(x, self._num_slices)
        return y


class _InTurn(nn.Module):
    """A matrix in pieces; `kind` is what the divided side's pieces are of."""

    one_layer = True

    def __init__(self, whole: nn.Linear, kind: str, num_slices: int) -> None:
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias
        self._whole = [whole]  # no submodule: parameters keep their names
        self._dimension, self._num_slices, self._kind = DIMENSION[kind], num_slices, kind


class ColumnsInTurn(_InTurn):
    """A matrix divided by columns: its pieces' results, side by side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the whole matrix makes of x, [devices, ...]."""
        own = narrowed(self._whole[0], self._kind, self._num_slices)
        weights = _pieces(self.weight, 0, self._num_slices)
        biases = [None] * len(weights) if self.bias is None else _pieces(self.bias, 0, self._num_slices)
        parts = zip(x.unbind(), weights, biases, strict=True)
        pieces = [_Piece.apply(with_parameters(own, weight=w, bias=b)(copy)) for copy, w, b in parts]
        return torch.cat(pieces, self._dimension)


class RowsInTurn(_InTurn):
    """A matrix divided by rows: the sum of its pieces' results, in the devices' order, and the bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the whole matrix makes of x."""
        weights = _pieces(self.weight, 1, self._num_slices)
        read = _pieces(x, self._dimension, self._num_slices)
        pairs = [(w.contiguous(), own.contiguous()) for w, own in zip(weights, read, strict=True)]  # as on devices
        y: torch.Tensor = reduce(
            torch.add, [with_parameters(self._whole[0], weight=w, bias=None)(own) for w, own in pairs]
        )
        return y if self.bias is None else y + self.bias


def _pieces(tensor: torch.Tensor, dimension: int, num_slices: int) -> tuple[torch.Tensor, ...]:
    """Return views of a tensor's pieces: all are as wide but the last, which may be narrower, or have nothing."""
    pieces = torch.split(tensor, math.ceil(tensor.shape[dimension] / num_slices), dimension)
    nothing = pieces[-1].narrow(dimension, 0, 0)
    return (*pieces, *[nothing] * (num_slices - len(pieces)))
