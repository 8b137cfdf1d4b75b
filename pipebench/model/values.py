"""The values that layers return and read: pytrees with tensors as leaves."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def address_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage; None for a tensor inside a transform of torch.func, which has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree in order; a fast path serves single tensors, the common case."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree that require a gradient."""
    return [leaf for leaf in tensors_in(value) if leaf.requires_grad]


def detached(value: Any) -> Any:
    """Return a pytree with its tensors detached, for sending; they keep their `requires_grad`."""
    return _detached(value) if isinstance(value, torch.Tensor) else pytree.tree_map(_detached, value)


def bytes_in(value: Any) -> int:
    """Return the bytes of the tensors of a pytree; fast paths serve single tensors and lists of them."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list):
        return sum(map(bytes_in, value))
    return sum(tensor.nbytes for tensor in tensors_in(value))


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
