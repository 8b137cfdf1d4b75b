"""A unit between its forward and the end of its backward: what a replica saves for it, and recomputation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge

from pipebench.engine.split import Rest
from pipebench.engine.swap import Swap
from pipebench.engine.version import Version
from pipebench.model.graph import is_torchs_own
from pipebench.model.recompute import Recomputed, Storages
from pipebench.model.stage import LossFunction
from pipebench.model.values import address_of


@dataclass
class InFlight:
    """A unit that has run forward."""

    number: int  # of the forward's weight version
    version: Version  # the forward's weights, possibly displaced from that version
    received: dict[int, Any]  # values from other stages by layer, as leaves
    draw: tuple[int, ...]  # key of random layers' draws
    loss: LossFunction | None  # maps the model's output to the loss
    carried: list[Any]  # stateful modules' states before the forward, for recomputation
    # Where gradients enter the graph: by layer whose value has left, an edge per tensor that requires grad
    results: dict[int, list[GradientEdge]] = field(default_factory=dict)
    of_loss: list[GradientEdge] = field(default_factory=list)  # the loss's edge, if the stage computes it
    loss_type: torch.dtype | None = None  # the loss's
    saved_bytes: int = 0  # saved for the backward on the device, and never swapped
    shapes: tuple[torch.Size, ...] = ()  # of the forward's arguments
    rests: list[Rest] = field(default_factory=list)  # weight parts, after the input part of a split backward
    swap: Swap | None = None  # what swapped layers save; None without such layers

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, saved for the backward."""
        return self.saved_bytes + (0 if self.swap is None else self.swap.device_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes on the host, saved for the backward."""
        return 0 if self.swap is None else self.swap.host_bytes


@contextmanager
def record_saved(saved: Storages, recomputed: Sequence[Recomputed]) -> Iterator[None]:
    """Record in `saved`, by address, the storages that autograd saves or recomputed layers need, each once.

    `saved` keeps the storages alive, so that no other gets the address of one that is freed.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (address := address_of(tensor)) is not None:
            saved[address] = tensor.untyped_storage()
        return tensor

    for each in recomputed:
        each.saved = saved
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    for each in recomputed:
        each.saved = None


@contextmanager
def record_again(again: Storages, recomputed: Sequence[Recomputed]) -> Iterator[None]:
    """Record in `again`, by address, the storages that a backward recomputes; see `record_saved`."""
    for each in recomputed:
        each.again = again
    yield
    for each in recomputed:
        each.again = None


class Recomputation:
    """What a stage does around the recomputation of layers in its backwards.

    Running statistics must not be updated twice. A BatchNorm gets copies of its buffers to update meanwhile; buffers of
    other modules are set to their values again.
    """

    def __init__(self, recomputed: Sequence[Recomputed]) -> None:
        self._recomputed = recomputed
        parts = [part for each in recomputed for part in each.run.modules()]
        norms = [part for part in parts if isinstance(part, nn.modules.batchnorm._NormBase) and is_torchs_own(part)]
        self._norms = [(norm, {n: b if b is None else b.clone() for n, b in norm._buffers.items()}) for norm in norms]
        others = [part for part in parts if part not in norms]
        self._other_buffers = [buffer for part in others for buffer in part.buffers(recurse=False)]
        # Bytes that a backward recomputes and frees, by the shapes of its forward's arguments
        self.num_bytes: dict[tuple[torch.Size, ...], int] = {}

    @property
    def storages(self) -> set[int]:
        """Addresses of the copies of buffers."""
        copies = (buffer for _, table in self._norms for buffer in table.values() if buffer is not None)
        return {buffer.untyped_storage().data_ptr() for buffer in copies}

    @contextmanager
    def run(self, shapes: tuple[torch.Size, ...], own_storages: Callable[[], set[int]]) -> Iterator[None]:
        """Run a backward inside; measure the bytes that it recomputes the first time for each shape.

        Args:
            shapes: of the arguments of the unit's forward.
            own_storages: returns the addresses of what isn't recomputed: weights and the stage's other tensors.
        """
        with self._same_statistics():
            if shapes in self.num_bytes:
                yield
                return
            again: dict[int, torch.UntypedStorage] = {}
            with record_again(again, self._recomputed):
                yield
            own = own_storages()
            self.num_bytes[shapes] = sum(each.nbytes() for address, each in again.items() if address not in own)

    @contextmanager
    def _same_statistics(self) -> Iterator[None]:
        """Recompute without a second update of running statistics, BatchNorm's or a model's own."""
        replaced = [norm._buffers for norm, _ in self._norms]
        others = [(buffer, buffer.clone()) for buffer in self._other_buffers]
        for norm, copies in self._norms:  # copies, not None: without buffers autograd would save fewer tensors
            norm._buffers = copies
        try:
            yield
        finally:
            for (norm, _), buffers in zip(self._norms, replaced, strict=True):
                norm._buffers = buffers
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._other_buffers)):
                for buffer, before in others:
                    buffer.copy_(before)
