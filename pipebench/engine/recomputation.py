"""Recomputation of forwards in a backward, without updating running statistics twice."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from pipebench.engine.in_flight import record_again
from pipebench.model.graph import is_torchs_own
from pipebench.model.recompute import Recomputed


class Recomputation:
    """Recomputes the given layers of a stage in its backwards."""

    def __init__(self, recomputed: Sequence[Recomputed]) -> None:
        self._recomputed = recomputed
        parts = [part for each in recomputed for part in each.run.modules()]
        norms = [part for part in parts if isinstance(part, nn.modules.batchnorm._NormBase) and is_torchs_own(part)]
        self._norms = [(norm, {n: b if b is None else b.clone() for n, b in norm._buffers.items()}) for norm in norms]
        others = [part for part in parts if part not in norms]  # whose buffers may change in any way
        self._own_buffers = [buffer for part in others for buffer in part.buffers(recurse=False)]
        # Bytes that a backward recomputes, by the shapes of its forward's arguments; freed with the backward
        self.num_bytes: dict[tuple[torch.Size, ...], int] = {}

    @property
    def storages(self) -> set[int]:
        """Addresses of the buffers held for recomputation."""
        copies = (buffer for _, table in self._norms for buffer in table.values() if buffer is not None)
        return {buffer.untyped_storage().data_ptr() for buffer in copies}

    @contextmanager
    def run(self, shapes: tuple[torch.Size, ...], own_storages: Callable[[], set[int]]) -> Iterator[None]:
        """Recompute within a backward; measure the bytes the first time for each of the `shapes` its forward read.

        `own_storages` returns the addresses of the stage's other tensors.
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
        own = [(buffer, buffer.clone()) for buffer in self._own_buffers]
        for norm, others in self._norms:  # never none, or autograd would save fewer tensors than before
            norm._buffers = others
        try:
            yield
        finally:
            for (norm, _), buffers in zip(self._norms, replaced, strict=True):
                norm._buffers = buffers
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self._own_buffers)):
                for buffer, before in own:
                    buffer.copy_(before)
