"""A unit between its forward and the end of its backward: what a replica keeps of it, and how much memory that is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from pipebench.engine.split import Rest
from pipebench.engine.swap import Swap
from pipebench.engine.weights import Version
from pipebench.model.recompute import Recomputed, Storages
from pipebench.model.stage import LossFunction


@dataclass
class InFlight:
    """A unit that has run forward.

    Attributes:
        number: of the version that it uses.
        version: the weights that it ran forward with, which may be moved from that version.
        received: values from other stages by layer, gradients wanted for their leaves.
        draw: what its random layers depended on.
        loss: what mapped the model's output to the loss.
        carried: what stateful modules carried into the forward, to recompute it.
        results: where gradients come in: the values themselves have left.
        loss_type: of the loss.
        kept_bytes: what is kept for the backward, and never swapped.
        shapes: of what the forward read.
        rests: what the input part of its backward has left.
        swap: what swapped layers save; None in a stage without.
    """

    number: int
    version: Version
    received: dict[int, Any]
    draw: tuple[int, ...]
    loss: LossFunction | None
    carried: list[Any]
    results: list[GradientEdge] = field(default_factory=list)
    loss_type: torch.dtype | None = None
    kept_bytes: int = 0
    shapes: tuple[torch.Size, ...] = ()
    rests: list[Rest] = field(default_factory=list)
    swap: Swap | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on the device for the backward."""
        return self.kept_bytes + (0 if self.swap is None else self.swap.device_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes on the host for the backward."""
        return 0 if self.swap is None else self.swap.host_bytes


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree, in its order; most values are one, and pytrees take their time."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def differentiable(value: Any) -> list[torch.Tensor]:
    """Return those tensors of a pytree that require a gradient."""
    return [leaf for leaf in tensors_in(value) if leaf.requires_grad]


def detached(value: Any) -> Any:
    """Detach the tensors of a pytree that leaves; whether one has a gradient travels along as its `requires_grad`."""
    return _detached(value) if isinstance(value, torch.Tensor) else pytree.tree_map(_detached, value)


def num_bytes(value: Any) -> int:
    """Return the bytes of the tensors of a pytree."""
    return sum(tensor.nbytes for tensor in tensors_in(value))


@contextmanager
def record_saved(saved: Storages, recomputed: Sequence[Recomputed]) -> Iterator[None]:
    """Note every storage that autograd saves, or that layers need which are recomputed, once each.

    Args:
        saved: takes the storages by address: as long as it holds them, no other gets theirs.
        recomputed: the runs of layers that a backward computes again.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    for each in recomputed:
        each.kept = saved
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    for each in recomputed:
        each.kept = None


@contextmanager
def record_again(again: Storages, recomputed: Sequence[Recomputed]) -> Iterator[None]:
    """Note every storage that a backward computes again for itself; arguments as for `record_saved`."""
    for each in recomputed:
        each.again = again
    yield
    for each in recomputed:
        each.again = None


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
