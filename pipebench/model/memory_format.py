"""The order of a tensor's elements in memory: contiguous, or channels last (NHWC) for images and convolutions' weights.

Messages and flat buffers have the elements in the order of the tensor's memory.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
_DIMENSIONS = 4  # [N, C, H, W]


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is channels last in memory; False if both orders are the same."""
    if tensor.dim() != _DIMENSIONS or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor channels last if it has floating-point elements and four dimensions, else as it is."""
    if tensor.dim() != _DIMENSIONS or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def lay_out(module: M) -> M:
    """Make a module's parameters channels last, in place; return the module."""
    for parameter in module.parameters():
        parameter.data = channels_last(parameter.data)
    return module


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same elements, in the order of memory: [N, H, W, C] if channels last.

    torch's lazy conjugates and negatives are computed, because the memory behind them has other numbers.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.permute(0, 2, 3, 1) if is_channels_last(tensor) else tensor.contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the bytes, [bytes] uint8, of a tensor that `in_order` has returned."""
    # A tensor of one element may have any stride; with some, torch refuses to view it as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def shaped(run: torch.Tensor, shape: Sequence[int], *, last: bool) -> torch.Tensor:
    """Return a view of a flat tensor as one of this shape; `last`: whether its elements are in channels-last order."""
    if not last:
        return run.view(shape)
    samples, channels, height, width = shape
    return run.view(samples, height, width, channels).permute(0, 3, 1, 2)


def laid_out_as(values: Iterable[torch.Tensor | None], like: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return values with the strides of the tensors in `like`; those with other strides are copied."""
    return [
        value if value is None or value.stride() == other.stride() else torch.empty_like(other).copy_(value)
        for value, other in zip(values, like, strict=True)
    ]
