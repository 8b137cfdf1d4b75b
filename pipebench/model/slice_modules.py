"""Layers in slices: what one of k neighbouring devices holds and computes, and what the devices sum and gather.

A device has a copy of a divided module, of the same class, with pieces of its parameters under the same names.
"""

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from pipebench.model.slicing import HEADS


class SliceGroup(Protocol):
    """The devices among which layers are divided."""

    size: int
    rank: int

    def sum(self, tensor: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """Return the sum over all devices, in their order; `counts`: whether its bytes are recorded as of slices."""

    def gather(self, piece: torch.Tensor, num_features: int) -> torch.Tensor:
        """Return all devices' pieces of features side by side; the last ones may be narrower, or empty."""


class Cut(NamedTuple):
    """Which part of a tensor a device has."""

    dimension: int  # the divided one
    start: int  # index in that dimension where the part begins
    shape: tuple[int, ...]  # of the whole tensor
    size: int  # of the part in that dimension

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor, a view."""
        return whole.narrow(self.dimension, self.start, self.size)


class Slices(NamedTuple):
    """What a process has of layers that are divided among several."""

    group: SliceGroup
    cuts: Mapping[str, Cut]  # of the divided parameters, by their names in the traced model


class Divided(NamedTuple):
    """Which tensors of a list are slices of whole ones, where layers are divided among processes."""

    group: SliceGroup
    which: torch.Tensor  # [tensors] bool

    def whole(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the squared norms of the whole tensors, given those of this process's slices; a collective call."""
        return torch.where(self.which.to(squares.device), self.group.sum(squares, counts=False), squares)


class Alone:
    """One of k devices, without the others: for shapes and times."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def sum(self, tensor: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def gather(self, piece: torch.Tensor, num_features: int) -> torch.Tensor:
        """Return as many features, as if all devices had this piece."""
        return side_by_side([piece] * self.size, num_features)


class _SumForward(torch.autograd.Function):
    """Sums the devices' outputs; each gets the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: SliceGroup) -> torch.Tensor:
        return group.sum(value).view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _SumBackward(torch.autograd.Function):
    """Passes a value on unchanged; its gradient is the sum of the devices' gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: SliceGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.group.sum(gradient), None


class _Gather(torch.autograd.Function):
    """Puts the devices' pieces side by side, of which the last may be narrower; each gets its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: SliceGroup, num_features: int) -> torch.Tensor:
        ctx.piece = group.rank * math.ceil(num_features / group.size), value.shape[-1]
        return group.gather(value, num_features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.narrow(-1, *ctx.piece).contiguous(), None, None


class CopiedToSlices(nn.Module):
    """Precedes layers that are divided by columns: the gradient of their input is the sum of the devices' gradients."""

    one_layer = True

    def __init__(self, group: SliceGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        y: torch.Tensor = _SumBackward.apply(x, self.group)
        return y


class SummedSlices(nn.Module):
    """A matrix divided by rows: the devices' results are summed, and the bias, which all of them have, is added."""

    one_layer = True

    def __init__(self, divided: nn.Linear, group: SliceGroup) -> None:
        super().__init__()
        self.weight, self.bias, self.group = divided.weight, divided.bias, group
        self._divided = [divided]  # in a list, so that it is no submodule and parameters keep their names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of the whole matrix and all devices' pieces of x."""
        own = with_parameters(self._divided[0], weight=self.weight, bias=None)
        y: torch.Tensor = _SumForward.apply(own(x), self.group)
        return y if self.bias is None else y + self.bias


class GatheredSlices(nn.Module):
    """A matrix divided by columns, whose features are gathered."""

    one_layer = True

    def __init__(self, divided: nn.Linear, group: SliceGroup, num_features: int) -> None:
        super().__init__()
        self.weight, self.bias, self.group, self.num_features = divided.weight, divided.bias, group, num_features
        self._divided = [divided]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of the whole matrix and x."""
        own = with_parameters(self._divided[0], weight=self.weight, bias=self.bias)
        gathered: torch.Tensor = _Gather.apply(own(x), self.group, self.num_features)
        return gathered


class EmbeddingSlices(nn.Module):
    """An embedding divided by rows: the sum of the devices' results, vectors for their own tokens, zeros for others."""

    one_layer = True

    def __init__(self, divided: nn.Embedding, group: SliceGroup, num_rows: int) -> None:
        super().__init__()
        self.weight, self.group = divided.weight, group
        self.num_embeddings = num_rows
        self.start = group.rank * math.ceil(num_rows / group.size)
        padding = divided.padding_idx
        self._sparse = divided.sparse
        self._padding = None if padding is None else padding - self.start

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens' vectors."""
        own = tokens - self.start
        elsewhere = (own < 0) | (own >= len(self.weight))
        padding = self._padding if self._padding is not None and 0 <= self._padding < len(self.weight) else None
        own = own.masked_fill(elsewhere, 0)
        # The last devices may have no rows, and a lookup needs one.
        rows = self.weight if len(self.weight) else nn.functional.pad(self.weight, (0, 0, 0, 1))
        vectors = nn.functional.embedding(own, rows, padding, sparse=self._sparse)
        vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        y: torch.Tensor = _SumForward.apply(vectors, self.group)
        return y


class DropoutSlices(nn.Module):
    """Dropout of pieces in one mode of a model, drawn for the whole, so that any number of devices drops the same."""

    one_layer = True

    def __init__(self, whole: nn.Dropout, dimension: int, group: SliceGroup) -> None:
        super().__init__()
        # Not `self.training`: stages set the mode of modules by the names that these have in the model itself.
        self.p = whole.p if whole.training else 0.0
        self.dimension, self.group = dimension, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the device's piece of the whole's dropout."""
        if self.p == 0:
            return x
        shape = list(x.shape)
        shape[self.dimension] *= self.group.size
        factors = nn.functional.dropout(x.new_ones(shape), self.p)
        return x * piece(factors, self.dimension, self.group).clone()


def cut_of(tensor: torch.Tensor, dimension: int, group: SliceGroup) -> Cut:
    """Return a device's part of a tensor. Parts are equally wide, except that the last may be narrower or empty."""
    size = tensor.shape[dimension]
    width = math.ceil(size / group.size)
    start = min(size, group.rank * width)
    return Cut(dimension, start, tuple(tensor.shape), min(width, size - start))


def piece(tensor: torch.Tensor, dimension: int, group: SliceGroup) -> torch.Tensor:
    """Return a device's piece, a view."""
    return cut_of(tensor, dimension, group).of(tensor)


def side_by_side(pieces: Iterable[torch.Tensor], num_features: int) -> torch.Tensor:
    """Return pieces side by side, without what pads the last ones."""
    return torch.cat([*pieces], -1)[..., :num_features]


def with_parameters(module: nn.Module, **parameters: torch.Tensor | None) -> nn.Module:
    """Return a shallow copy of a module with these tensors in place of its parameters."""
    made = copy.copy(module)
    made._parameters = cast("dict[str, nn.Parameter | None]", parameters)
    return made


def narrowed(module: nn.Linear, kind: str, num_slices: int) -> nn.Linear:
    """Return a shallow copy with the same parameters and the number of output features, or heads, of a slice."""
    made = copy.copy(module)
    made._parameters = dict(module._parameters)
    made.out_features = math.ceil(module.out_features / num_slices)
    if kind == HEADS:
        made.num_heads = module.num_heads // num_slices  # type: ignore[assignment, operator]
    return made
