"""Storages that forwards save for their backwards: several layers may save one, whose bytes count once in a stage."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pipebench.model.values import tensors_in
from pipebench.profile.step import WalkStep

_NOT_COUNTED = -1  # the number of all storages of parameters and buffers


class SavedStorages:
    """Numbers the storages of a pass, but those of parameters and buffers, and notes the last step that saves each."""

    def __init__(self, parameters_and_buffers: Iterable[torch.Tensor]) -> None:
        self._numbers: dict[int, int] = {}  # by address
        self._known: list[StorageWeakRef] = []  # while these exist no other storage gets their addresses
        self._bytes: list[int] = []  # by number
        self._holders: dict[int, int] = {}  # number to the index of the last step that saves it
        self.leave_out(parameters_and_buffers)

    def leave_out(self, parameters_and_buffers: Iterable[torch.Tensor]) -> None:
        """Don't count the storages of these tensors."""
        for tensor in parameters_and_buffers:
            self._set_number(tensor.untyped_storage(), _NOT_COUNTED)

    def note_copies(self, value: Any, copies: Any) -> None:
        """Count the storages of a value's copies as those of the value."""
        for tensor, made in zip(tensors_in(value), tensors_in(copies), strict=True):
            self._set_number(made.untyped_storage(), self._number(tensor))

    def storages(self, values: Iterable[Any]) -> dict[int, int]:
        """Return number to bytes of the storages of the values' tensors, but parameters and buffers."""
        numbers = map(self._number, tensors_in([*values]))
        return {number: self._bytes[number] for number in numbers if number != _NOT_COUNTED}

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._set_number(storage, len(self._bytes))
            self._bytes.append(storage.nbytes())
        return self._numbers[storage._cdata]

    def _set_number(self, storage: torch.UntypedStorage, number: int) -> None:
        self._numbers[storage._cdata] = number
        self._known.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def counted(self, step: WalkStep, index: int) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context that counts what the forward of the step with this index saves.

        What is saved is a detached tensor: an output that is saved by its own operation would keep itself alive until
        a backward, which not every counted forward has.
        """

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            number = self._number(tensor)
            holder = self._holders.get(number)
            if number == _NOT_COUNTED or holder == index:
                return tensor.detach()
            num_bytes = self._bytes[number]
            step.saved_storages[number] = num_bytes
            if holder is None:
                step.saved_bytes += num_bytes
            else:
                step.saved_with[holder] += num_bytes
            self._holders[number] = index
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
