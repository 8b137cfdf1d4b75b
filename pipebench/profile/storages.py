"""Storages that forwards save for their backwards: several layers may save one, whose bytes count once in a stage."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pipebench.model.values import tensors_in
from pipebench.profile.step import WalkStep


class SavedStorages:
    """Numbers storages and notes the last step that saves each; None for those of parameters and buffers, `there`."""

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        self._holders: dict[int, int | None] = {}
        self._numbers: dict[int, int] = {}
        self._known: list[StorageWeakRef] = []  # while these are here nothing else has their addresses
        self.note_there(there)

    def note_there(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the storages of parameters and buffers."""
        found = [tensor.untyped_storage() for tensor in tensors]
        self._holders |= {storage._cdata: None for storage in found}
        self._known += map(StorageWeakRef, found)

    def storages(self, values: Iterable[Any]) -> dict[int, int]:
        """Return number to bytes of the storages of the values' tensors, but parameters and buffers."""
        found = (tensor.untyped_storage() for tensor in tensors_in([*values]))
        return {self._number(each): each.nbytes() for each in found if self._holders.get(each._cdata, -1) is not None}

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._numbers)
            self._known.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return self._numbers[storage._cdata]

    def counted(self, step: WalkStep, index: int) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context that counts what the forward of the step with this index saves.

        What is saved is a detached tensor: an output that is saved by its own operation would keep itself alive until
        a backward, which not every counted forward has.
        """

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            holder = self._holders.setdefault(storage._cdata, -1)
            if holder is None or holder == index:
                return tensor.detach()
            step.keeps[self._number(storage)] = storage.nbytes()
            if holder < 0:
                step.saved_bytes += storage.nbytes()
            else:
                step.saved_with[holder] += storage.nbytes()
            self._holders[storage._cdata] = index
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
