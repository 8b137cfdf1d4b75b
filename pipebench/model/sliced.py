"""Divides a traced model's layers among k devices: the graph stays, with pieces of the matrices in its modules.

In the virtual engine's one process, the pieces of all devices are computed in turn. Modules keep the model's whole
parameters there, so that optimizers, norms, versions and checkpoints are those of the whole model. Only the rounding of
sums of k partial products differs from the whole model, as it does on k devices.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from pipebench.errors import GraphError
from pipebench.model.graph import DRAWS_AS, attribute, draw_name, is_random
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
    """Divides the graphs of a model, of training and of evaluation, for one device of a group; both share the pieces.

    Args:
        group: the devices.
        in_processes: whether each device is to train in a process of its own, where no function may draw for pieces.
    """

    def __init__(self, group: SliceGroup, *, in_processes: bool = False) -> None:
        self._group, self._in_processes = group, in_processes
        self.cuts: dict[str, Cut] = {}  # of divided parameters, by their names in the graphs
        self._pieces: dict[int, nn.Parameter] = {}  # by the whole parameter's id
        self._modules: dict[int, nn.Module] = {}  # by the whole module's id
        self._wholes: list[Any] = []  # modules and tensors kept alive, so that no others get their ids
        self._used_whole: dict[int, str] = {}  # modules and parameters by id, to a layer that uses them undivided

    def __call__(self, module: fx.GraphModule) -> None:
        """Divide a graph in place.

        Raises:
            GraphError: nothing can be divided, or features or heads don't divide; a matrix is divided in one graph and
                whole in the other; or, in processes, a function draws.
        """
        found = find_slices(module, self._group.size)
        self._note_whole(module, found)
        calls = {str(node.target): (node, dimension) for node, dimension in found.divided.items()}
        for path, (node, dimension) in calls.items():
            whole = module.get_submodule(path)
            self._wholes.append(whole)
            if id(whole) not in self._modules:
                self._modules[id(whole)] = self._divided(whole, node, dimension, found)
            module.set_submodule(path, self._modules[id(whole)])
            self._note_cuts(path, whole, dimension)
        for each in (*self._modules, *self._pieces):
            if each in self._used_whole:
                raise GraphError(
                    f"parallelism.tensor: got {self._group.size}, and layer {self._used_whole[each]} is divided in "
                    "training only, or in evaluation only: allowed is a model that uses it alike in both"
                )
        self._treat_alone(module, found)
        self._copy_inputs(module, [*found.columns, *found.gathered])
        module.graph.lint()
        module.recompile()

    def _note_whole(self, module: fx.GraphModule, found: Slicing) -> None:
        """Note which modules and parameters a graph uses undivided."""
        for node in module.graph.nodes:
            if node in found.divided or node.op not in ("get_attr", "call_module"):
                continue
            used = attribute(module, str(node.target))
            self._wholes.append(used)
            parameters = used.parameters() if isinstance(used, nn.Module) else ()
            self._used_whole |= dict.fromkeys(map(id, (used, *parameters)), node.name)

    def _divided(self, whole: nn.Module, node: fx.Node, dimension: int, found: Slicing) -> nn.Module:
        """Return a device's part of a module, whose weight is divided in a dimension."""
        parameters = dict(whole._parameters)
        for name, parameter in whole.named_parameters(recurse=False):
            if parameter.dim() > dimension:  # the bias of a matrix that is divided by rows stays whole
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
        """In processes, refuse functions that draw random numbers for pieces: they are others than for the whole."""
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
        """Return the module to insert before layers that are divided by columns."""
        return CopiedToSlices(self._group)

    def _copy_inputs(self, module: fx.GraphModule, columns: Sequence[fx.Node]) -> None:
        """Let layers that are divided by columns read copies of their inputs, one copy of each value."""
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
    """Divides layers for a process that trains, in which dropout draws the same numbers as for the whole."""

    def __init__(self, group: SliceGroup) -> None:
        super().__init__(group, in_processes=True)

    def _treat_alone(self, module: fx.GraphModule, found: Slicing) -> None:
        """Give pieces dropout modules of their own, since the model may also use its module for whole values."""
        super()._treat_alone(module, found)
        for node in module.graph.find_nodes(op="call_module"):
            node.meta[DRAWS_AS] = draw_name(module, node)  # now, as it is made of targets, which change below
        for node, kind in found.alone.items():
            path = str(node.target)
            if node.op == "call_module" and isinstance(whole := module.get_submodule(path), nn.Dropout):
                node.target = f"{path}_of_{kind}"
                module.add_submodule(node.target, DropoutSlices(whole, DIMENSION[kind], self._group))


class SlicerInTurn(Slicer):
    """Divides a traced model's layers into k pieces each, all of which are computed in this process."""

    def __init__(self, num_slices: int) -> None:
        super().__init__(Alone(num_slices))
        self._num_slices = num_slices

    def _divided(self, whole: nn.Module, node: fx.Node, dimension: int, found: Slicing) -> nn.Module:
        """Return a module that computes all pieces."""
        if isinstance(whole, nn.Embedding):
            return whole  # the sum of its pieces is exact: all but one are zeros
        assert isinstance(whole, nn.Linear)
        if node in found.rows:
            return RowsInTurn(whole, found.rows[node], self._num_slices)
        return ColumnsInTurn(whole, found.columns.get(node, FEATURES), self._num_slices)

    def _copied(self) -> nn.Module:
        return CopiesInTurn(self._num_slices)


class _Copies(torch.autograd.Function):
    """Copies a value to all devices; its gradient is the sum of the copies' gradients, in the devices' order."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, num_slices: int) -> torch.Tensor:
        return value.expand(num_slices, *value.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return reduce(torch.add, gradient.unbind()), None


class _Piece(torch.autograd.Function):
    """The output of one device; its gradient is made contiguous, as on the device, so that kernels add in one order."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.contiguous()


class _RowsOfDevice(torch.autograd.Function):
    """The product of a piece of x and of a weight, copied as on a device.

    The backward copies the weight again, since some weight policies let it use other weights than the forward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, whole: nn.Linear) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.whole = whole
        y: torch.Tensor = with_parameters(whole, weight=weight.contiguous(), bias=None)(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
        read = [tensor.detach().contiguous().requires_grad_(needed) for tensor, needed in pairs]
        with torch.enable_grad():
            y = with_parameters(ctx.whole, weight=read[1], bias=None)(read[0])
        found = iter(torch.autograd.grad(y, [tensor for tensor in read if tensor.requires_grad], gradient))
        return *(next(found) if tensor.requires_grad else None for tensor in read), None


class CopiesInTurn(nn.Module):
    """Precedes layers that are divided by columns: each device's pieces read, and add gradients to, its own copy."""

    one_layer = True

    def __init__(self, num_slices: int) -> None:
        super().__init__()
        self._num_slices = num_slices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x for every device, [devices, ...]: views of x."""
        y: torch.Tensor = _Copies.apply(x, self._num_slices)
        return y


class _InTurn(nn.Module):
    """A matrix in pieces; `kind` is the kind of pieces, features or heads, on its divided side."""

    one_layer = True

    def __init__(self, whole: nn.Linear, kind: str, num_slices: int) -> None:
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias
        self._whole = [whole]  # in a list, so that it is no submodule and parameters keep their names
        self._dimension, self._num_slices, self._kind = DIMENSION[kind], num_slices, kind


class ColumnsInTurn(_InTurn):
    """A matrix divided by columns: the pieces' results, side by side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of the whole matrix and x, [devices, ...]."""
        own = narrowed(self._whole[0], self._kind, self._num_slices)
        weights = _pieces(self.weight, 0, self._num_slices)
        biases = [None] * len(weights) if self.bias is None else _pieces(self.bias, 0, self._num_slices)
        parts = zip(x.unbind(), weights, biases, strict=True)
        pieces = [_Piece.apply(with_parameters(own, weight=w, bias=b)(copy)) for copy, w, b in parts]
        return torch.cat(pieces, self._dimension)


class RowsInTurn(_InTurn):
    """A matrix divided by rows: the sum of the pieces' results, in the devices' order, plus the bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of the whole matrix and x."""
        weights = _pieces(self.weight, 1, self._num_slices)
        read = _pieces(x, self._dimension, self._num_slices)
        pairs = [(own.contiguous(), w) for w, own in zip(weights, read, strict=True)]  # contiguous as on devices
        y: torch.Tensor = reduce(torch.add, [_RowsOfDevice.apply(own, w, self._whole[0]) for own, w in pairs])
        return y if self.bias is None else y + self.bias


def _pieces(tensor: torch.Tensor, dimension: int, num_slices: int) -> tuple[torch.Tensor, ...]:
    """Return views of a tensor's pieces, which are equally wide, except that the last ones may be narrower or empty."""
    pieces = torch.split(tensor, math.ceil(tensor.shape[dimension] / num_slices), dimension)
    nothing = pieces[-1].narrow(dimension, 0, 0)
    return (*pieces, *[nothing] * (num_slices - len(pieces)))
