"""Slices of layers in one process, which computes every device's piece in turn: what the virtual engine trains.

Modules keep the model's own parameters whole, so optimizers, norms, versions and checkpoints are those of the whole
model. What differs from it is the rounding of sums of k partial products, as on k devices.
"""

import math
from functools import reduce
from typing import Any

import torch
from torch import fx, nn

from pipebench.model.slice_modules import Alone, narrowed, with_parameters
from pipebench.model.sliced import Slicer
from pipebench.model.slicing import DIMENSION, FEATURES, Slicing


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
