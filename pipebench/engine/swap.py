"""Swapping: activations that layers save for a unit's backward are on the host between its forward and its backward.

Every storage is copied once, whole, however many tensors view it. Then all references to it are dropped: those of saved
tensors in the graph, and of the stage's inputs. Storages that are needed anyway stay: weights, buffers, and tensors
that layers which don't swap save, too.

On a GPU, copies in each direction have their own stream and use pinned memory. torch reuses that memory for later
copies only after the work queued on a stream has finished with it.
"""

from collections.abc import Callable, Container, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from pipebench.errors import GraphError
from pipebench.model.values import address_of

_NOWHERE = 0  # stands for the address of a storage that isn't swapped; also that of storages without bytes


class _Streams(NamedTuple):
    """A GPU's streams for copies in each direction."""

    out: torch.cuda.Stream
    back: torch.cuda.Stream


class Saved:
    """Stands in autograd's graph for a tensor that a swapped layer has saved."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # None while on the host. Detached: a layer's result refers to the graph, which would keep itself alive
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version  # autograd's counter of writes, when saved or copied back

    def checked(self) -> torch.Tensor:
        """Return the saved tensor after the check that autograd leaves out under saved-tensor hooks.

        Raises:
            GraphError: the tensor was overwritten after it was saved.
        """
        assert self.tensor is not None, "it is on the host"
        if self.tensor._version != self.version:
            times = self.tensor._version - self.version
            raise GraphError(
                f"a tensor of shape {tuple(self.tensor.shape)} and type {self.tensor.dtype} that a swapped layer has "
                f"saved for its backward was overwritten {times} times since: what overwrites it can't be in place"
            )
        return self.tensor

    def take(self, tensor: torch.Tensor | None) -> None:
        """Drop the tensor, or set it again."""
        self.tensor = tensor
        self.version = 0 if tensor is None else tensor._version


class _View(NamedTuple):
    """A tensor that viewed a storage which is now on the host."""

    take: Callable[[torch.Tensor], None]  # called with the tensor once it is back on the device
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the view of a storage with the same bytes, on any device."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)


class _Copied(NamedTuple):
    """A storage on the host, and its views."""

    host: torch.Tensor
    views: list[_View]


class Swap:
    """The saved activations of a stage's swapped layers for one unit; the stage computes on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device_bytes = 0  # of storages on the device that are swapped
        self.host_bytes = 0  # of those on the host
        self._device = device
        self._saved: list[Saved] = []  # during the forward, in saving order
        self._to_copy: dict[int, list[Saved]] = {}  # by storage address
        self._inputs: Sequence[torch.Tensor] = ()  # the stage's inputs whose storages are swapped
        self._copied: list[_Copied] = []  # on the host
        self._out_done: torch.cuda.Event | None = None  # recorded after the copies out
        self._back_done: torch.cuda.Event | None = None  # recorded after the copies back

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Save a tensor for autograd."""
        saved = Saved(tensor)
        self._saved.append(saved)
        return saved

    def saved_with(self, others: Container[int]) -> frozenset[int]:
        """Return the indices, in saving order, of tensors whose storages are among `others`, by address."""
        return frozenset(
            index for index, each in enumerate(self._saved) if _address(each.tensor, self._device) in others
        )

    def settle(self, staying: Container[int], own: Container[int], inputs: Sequence[torch.Tensor]) -> None:
        """Decide which storages to copy, after the forward.

        Args:
            staying: indices of saved tensors that stay on the device, see `saved_with`.
            own: addresses of storages that stay: weights and buffers.
            inputs: the values that the stage has received, which are the graph's leaves.
        """
        for index, saved in enumerate(self._saved):
            address = _address(saved.tensor, self._device)
            if saved.tensor is None or address == _NOWHERE or address in own or index in staying:
                continue
            if address not in self._to_copy:
                self.device_bytes += saved.tensor.untyped_storage().nbytes()
            self._to_copy.setdefault(address, []).append(saved)
        self._saved.clear()
        self._inputs = [tensor for tensor in inputs if _address(tensor, self._device) in self._to_copy]

    def copy_out(self) -> int:
        """Copy the storages to the host and free them on the device; return their bytes."""
        streams = _streams(self._device)
        if streams is not None:
            streams.out.wait_stream(torch.cuda.current_stream(self._device))
        found = {address: _host_copy(held[0].checked(), streams) for address, held in self._to_copy.items()}
        copied = {address: _Copied(host, []) for address, host in found.items()}
        self._out_done = None if streams is None else streams.out.record_event()
        for address, held in self._to_copy.items():
            for saved in held:
                copied[address].views.append(_view(saved.checked(), saved.take))
                saved.take(None)
        for tensor in self._inputs:  # to which the graph itself refers
            copied[_address(tensor, self._device)].views.append(_view(tensor, partial(setattr, tensor, "data")))
            tensor.data = torch.empty(1, dtype=tensor.dtype, device=self._device).expand(tensor.shape)
        self._to_copy, self._inputs, self._copied = {}, (), [*copied.values()]
        self.host_bytes, self.device_bytes = self.device_bytes, 0
        return self.host_bytes

    def copy_back(self) -> int:
        """Begin to copy the storages back, into memory that is allocated now; return their bytes."""
        num_bytes, streams = self.host_bytes, _streams(self._device)
        storages = [torch.empty_like(host, device=self._device, pin_memory=False) for host, _ in self._copied]
        if streams is None:
            for storage, (host, _) in zip(storages, self._copied, strict=True):
                storage.copy_(host)
        else:
            assert self._out_done is not None
            # Queued work may still read the previous tensor in that memory, and the copy out may still run.
            streams.back.wait_stream(torch.cuda.current_stream(self._device))
            streams.back.wait_event(self._out_done)
            with torch.cuda.stream(streams.back):
                for storage, (host, _) in zip(storages, self._copied, strict=True):
                    storage.copy_(host, non_blocking=True)
            self._back_done = streams.back.record_event()
        for storage, (_, views) in zip(storages, self._copied, strict=True):
            for view in views:
                view.take(view.of(storage.untyped_storage()))
        self._copied = []
        self.device_bytes, self.host_bytes = num_bytes, 0
        return num_bytes

    def wait(self) -> None:
        """Make later work wait for the copies back. Afterwards only the graph refers to the tensors."""
        if self._copied:  # there was no `copy_back` before the backward
            self.copy_back()
        if self._back_done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._back_done)
        self._to_copy, self._inputs = {}, ()


@cache
def _streams(device: torch.device) -> _Streams | None:
    """Return a device's copy streams; None for a CPU, which copies synchronously."""
    if device.type != "cuda":
        return None
    return _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _host_copy(tensor: torch.Tensor, streams: _Streams | None) -> torch.Tensor:
    """Return a host copy of a tensor's storage; on a GPU, complete once the stream `out` has run it."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=streams is not None)
    if streams is None:
        return host.copy_(flat)
    with torch.cuda.stream(streams.out):
        host.copy_(flat, non_blocking=True)
    flat.record_stream(streams.out)  # delays reuse of its memory
    return host


def _view(tensor: torch.Tensor, take: Callable[[torch.Tensor], None]) -> _View:
    return _View(take, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _address(tensor: torch.Tensor | None, device: torch.device) -> int:
    """Return the address of a tensor's storage; `_NOWHERE` if it is on another device or no plain view of one."""
    if tensor is None or tensor.layout is not torch.strided or tensor.device.type != device.type:
        return _NOWHERE
    address = None if tensor.is_conj() or tensor.is_neg() else address_of(tensor)
    return _NOWHERE if address is None else address
