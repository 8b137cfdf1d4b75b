"""Gradients on their way back over a cut: one per tensor of a value that may get one.

Through an `argmax` or a `.detach()` none flows, and an optimizer skips a parameter without a gradient, where it would
decay one whose gradient is zeros. Messages have a size by shape alone, so zeros are sent there all the same; they
require grad, as no gradient does, and the receiver leaves them out.
"""

from collections.abc import Mapping
from typing import Any

import torch

Gradients = dict[int, list[Any]]  # layer index to the gradients of its output's tensors


def gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    """Return what a backward found for a value's tensor, to send."""
    return torch.zeros_like(leaf, requires_grad=True) if leaf.grad is None else leaf.grad


def flows(gradient: torch.Tensor) -> bool:
    """Return whether it is a gradient, rather than zeros in place of one."""
    return not gradient.requires_grad


def add(total: Gradients, more: Mapping[int, list[torch.Tensor]], factor: float = 1.0) -> None:
    """Add gradients of a unit's values, times a factor, to those from later readers."""
    for layer, tensors in more.items():
        scaled = tensors if factor == 1.0 else [each * factor if flows(each) else each for each in tensors]
        known = total.get(layer)
        total[layer] = [_sum(*pair) for pair in zip(known, scaled, strict=True)] if known else scaled


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not flows(one):
        return other
    return one + other if flows(other) else one
