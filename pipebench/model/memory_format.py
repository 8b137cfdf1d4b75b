"""The order of a tensor's numbers in memory: its shape's, or channels last (NHWC) for images and convolutions' weights.

A run of numbers, in a message or a buffer, keeps a tensor's order; sizes are the same.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
_DIMENSIONS = 4  # [N, C, H, W]


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers lie channels last; False where both orders are the same."""
    if tensor.dim() != _DIMENSIONS or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor channels last if it can be: one of floating point and four dimensions."""
    if tensor.dim() != _DIMENSIONS or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def lay_out(module: M) -> M:
    """Lay a module's parameters out channels last, in place; return it."""
    for parameter in module.parameters():
        parameter.data = channels_last(parameter.data)
    return module


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers as they are to lie in memory: in its order, [N, H, W, C] if channels last, no lazy view.

    Of a conjugate or a negative, torch may have made a mark only, and its memory holds other numbers.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.permute(0, 2, 3, 1) if is_channels_last(tensor) else tensor.contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of `in_order`, [bytes] uint8: a view."""
    # A single number may have any stride, with which torch would not view it as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def shaped(run: torch.Tensor, shape: Sequence[int], *, last: bool) -> torch.Tensor:
    """Return the view of a run of numbers as a tensor of this shape, in channels-last order if `last`."""
    if not last:
        return run.view(shape)
    samples, channels, height, width = shape
    return run.view(samples, height, width, channels).permute(0, 3, 1, 2)


def laid_out_as(values: Iterable[torch.Tensor | None], like: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return values in the order in memory of as many others, copied where theirs is another."""
    return [
        value if value is None or value.stride() == other.stride() else torch.empty_like(other).copy_(value)
        for value, other in zip(values, like, strict=True)
    ]
