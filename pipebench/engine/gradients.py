"""Gradients of values that cross a cut: one per tensor of the value that requires grad.

Through an `argmax` or a `.detach()` no gradient flows. That differs from a gradient of zeros: an optimizer skips a
parameter without a gradient, and decays one whose gradient is zeros. But the size of a message depends on shapes only.
So zeros are sent in place of a missing gradient, marked by `requires_grad`, which no gradient has set; the receiver
leaves them out.
"""

from collections.abc import Mapping
from typing import Any

import torch

Gradients = dict[int, list[Any]]  # layer index to the gradients of its output's tensors


def gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a value's tensor after a backward, or marked zeros if it has none."""
    return torch.zeros_like(leaf, requires_grad=True) if leaf.grad is None else leaf.grad


def flows(gradient: torch.Tensor) -> bool:
    """Return whether a tensor is a gradient, not zeros in place of one."""
    return not gradient.requires_grad


def add(total: Gradients, more: Mapping[int, list[torch.Tensor]], factor: float = 1.0) -> None:
    """Add gradients of values, times a factor, to `total`, the sum over later readers of the values."""
    for layer, tensors in more.items():
        scaled = tensors if factor == 1.0 else [each * factor if flows(each) else each for each in tensors]
        known = total.get(layer)
        total[layer] = [_sum(*pair) for pair in zip(known, scaled, strict=True)] if known else scaled


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not flows(one):
        return other
    return one + other if flows(other) else one
