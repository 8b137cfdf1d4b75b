"""A unit's saved activations of swapped layers: copied to the host after the forward, and back before the backward.

Every storage is copied once, whole, however many tensors view it; then its references here are dropped: saved tensors
in the graph, and the stage's inputs. Storages that others keep stay: weights, buffers, and tensors that other layers
save too.

On a GPU, copies in each direction have their own stream and use pinned memory, which torch reuses for later copies only
after the work queued on a stream has finished with it.
"""

from collections.abc import Callable, Container, Sequence
from functools import cache
from typing import NamedTuple

import torch

from pipebench.errors import GraphError

_NOWHERE = 0  # address of storages without bytes


class _Streams(NamedTuple):
    """A GPU's streams for copies in each direction."""

    out: torch.cuda.Stream
    back: torch.cuda.Stream


class Saved:
    """Stands for a tensor saved by a swapped layer."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # None while on the host; detached, since a result itself would keep the graph alive that saves it
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version  # autograd's, when saved or copied back

    def checked(self) -> torch.Tensor:
        """Return the tensor as saved; with saved-tensor hooks autograd does not check this itself.

        Raises:
            GraphError: it has been overwritten since.
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
    """A tensor view of a storage on the host, and the function that takes it back."""

    take: Callable[[torch.Tensor], None]
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
        # Bytes on the device, of storages that nothing else keeps, and on the host
        self.device_bytes = self.host_bytes = 0
        self._device = device
        self._saved: list[Saved] = []
        self._going: dict[int, list[Saved]] = {}  # by storage address
        self._inputs: Sequence[torch.Tensor] = ()
        self._copied: list[_Copied] = []
        self._left: torch.cuda.Event | None = None
        self._arrives: torch.cuda.Event | None = None

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Save a tensor for autograd."""
        saved = Saved(tensor)
        self._saved.append(saved)
        return saved

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Return a saved tensor for its backward."""
        return saved.checked()

    def saved_with(self, others: Container[int]) -> frozenset[int]:
        """Return the indices, in saving order, of tensors whose storages something else keeps."""
        return frozenset(
            index for index, each in enumerate(self._saved) if _address(each.tensor, self._device) in others
        )

    def settle(self, staying: Container[int], own: Container[int], inputs: Sequence[torch.Tensor]) -> None:
        """Decide which storages to copy, after the forward.

        `staying` are indices of tensors that stay on the device (see `saved_with`), `own` addresses of storages that
        do: weights and buffers; `inputs` are the stage's received values, which are the graph's leaves.
        """
        for index, saved in enumerate(self._saved):
            address = _address(saved.tensor, self._device)
            if saved.tensor is None or address == _NOWHERE or address in own or index in staying:
                continue
            if address not in self._going:
                self.device_bytes += saved.tensor.untyped_storage().nbytes()
            self._going.setdefault(address, []).append(saved)
        self._saved.clear()
        self._inputs = [tensor for tensor in inputs if _address(tensor, self._device) in self._going]

    def copy_out(self) -> int:
        """Copy all to the host and free it here; return the bytes."""
        streams = _streams(self._device)
        if streams is not None:
            streams.out.wait_stream(torch.cuda.current_stream(self._device))
        found = {address: _host_copy(held[0].checked(), streams) for address, held in self._going.items()}
        copied = {address: _Copied(host, []) for address, host in found.items()}
        self._left = None if streams is None else streams.out.record_event()
        for address, held in self._going.items():
            for saved in held:
                copied[address].views.append(_view(saved.checked(), saved.take))
                saved.take(None)
        for tensor in self._inputs:
            copied[_address(tensor, self._device)].views.append(_view(tensor, _into(tensor)))
            tensor.data = torch.empty(1, dtype=tensor.dtype, device=self._device).expand(tensor.shape)
        self._going, self._inputs, self._copied = {}, (), [*copied.values()]
        self.host_bytes, self.device_bytes = self.device_bytes, 0
        return self.host_bytes

    def copy_back(self) -> int:
        """Begin to copy all back, into memory allocated now; return the bytes."""
        num_bytes, streams = self.host_bytes, _streams(self._device)
        storages = [torch.empty_like(host, device=self._device, pin_memory=False) for host, _ in self._copied]
        if streams is None:
            for storage, (host, _) in zip(storages, self._copied, strict=True):
                storage.copy_(host)
        else:
            assert self._left is not None
            # Queued work may still read the memory's previous tensor, and the copy out may still run.
            streams.back.wait_stream(torch.cuda.current_stream(self._device))
            streams.back.wait_event(self._left)
            with torch.cuda.stream(streams.back):
                for storage, (host, _) in zip(storages, self._copied, strict=True):
                    storage.copy_(host, non_blocking=True)
            self._arrives = streams.back.record_event()
        for storage, (_, views) in zip(storages, self._copied, strict=True):
            for view in views:
                view.take(view.of(storage.untyped_storage()))
        self._copied = []
        self.device_bytes, self.host_bytes = num_bytes, 0
        return num_bytes

    def wait(self) -> None:
        """Make later work wait for the copies; afterwards only the graph refers to the tensors."""
        if self._copied:  # nothing has begun to copy back
            self.copy_back()
        if self._arrives is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrives)
        self._going, self._inputs = {}, ()


@cache
def _streams(device: torch.device) -> _Streams | None:
    """Return a device's copy streams; None for a CPU, which copies synchronously."""
    if device.type != "cuda":
        return None
    return _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _host_copy(tensor: torch.Tensor, streams: _Streams | None) -> torch.Tensor:
    """Return a host copy of a tensor's storage, complete once its stream gets there."""
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


def _into(leaf: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a function that sets a graph leaf's values, since the graph refers to the leaf itself."""

    def take(values: torch.Tensor) -> None:
        leaf.data = values

    return take


def _address(tensor: torch.Tensor | None, device: torch.device) -> int:
    """Return the address of a tensor's storage on the device; `_NOWHERE` if elsewhere or not a plain view."""
    if tensor is None or tensor.layout is not torch.strided or tensor.device.type != device.type:
        return _NOWHERE
    return _NOWHERE if tensor.is_conj() or tensor.is_neg() else tensor.untyped_storage().data_ptr()
