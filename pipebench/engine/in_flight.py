"""A unit between its forward and the end of its backward: what a replica stores for it, and how many bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from pipebench.engine.split import Rest
from pipebench.engine.swap import Swap
from pipebench.engine.version import Version
from pipebench.model.recompute import Recomputed, Storages
from pipebench.model.stage import LossFunction


@dataclass
class InFlight:
    """A unit that has run forward."""

    number: int  # of its weight version
    version: Version  # the forward's weights, possibly displaced from that version
    received: dict[int, Any]  # values from other stages by layer, as leaves
    draw: tuple[int, ...]  # key of random layers' draws
    loss: LossFunction | None  # maps the model's output to the loss
    carried: list[Any]  # stateful modules' states before the forward, for recomputation
    results: list[GradientEdge] = field(default_factory=list)  # of the outputs, whose values have left
    loss_type: torch.dtype | None = None  # of the loss
    saved_bytes: int = 0  # saved for the backward and never swapped
    shapes: tuple[torch.Size, ...] = ()  # of the forward's arguments
    rests: list[Rest] = field(default_factory=list)  # left by the input part of its backward
    swap: Swap | None = None  # saved by swapped layers; None without such

    @property
    def num_bytes(self) -> int:
        """Bytes on the device for the backward."""
        return self.saved_bytes + (0 if self.swap is None else self.swap.device_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes on the host for the backward."""
        return 0 if self.swap is None else self.swap.host_bytes


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree in order; a fast path serves single tensors, the common case."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree that require a gradient."""
    return [leaf for leaf in tensors_in(value) if leaf.requires_grad]


def detached(value: Any) -> Any:
    """Detach the tensors of a pytree for sending, with their `requires_grad`."""
    return _detached(value) if isinstance(value, torch.Tensor) else pytree.tree_map(_detached, value)


def num_bytes(value: Any) -> int:
    """Return the bytes of the tensors of a pytree."""
    return sum(tensor.nbytes for tensor in tensors_in(value))


@contextmanager
def record_saved(saved: Storages, recomputed: Sequence[Recomputed]) -> Iterator[None]:
    """Record once each storage that autograd saves, or that recomputed layers need.

    `saved` takes storages by address and holds them, so that no other reuses an address.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    for each in recomputed:
        each.saved = saved
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    for each in recomputed:
        each.saved = None


@contextmanager
def record_again(again: Storages, recomputed: Sequence[Recomputed]) -> Iterator[None]:
    """Record each storage that a backward recomputes for itself; arguments as for `record_saved`."""
    for each in recomputed:
        each.again = again
    yield
    for each in recomputed:
        each.again = None


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
