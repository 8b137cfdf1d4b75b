"""Messages: values of any structure as one run of bytes, and back.

A message is a header of eight numbers, the text of its layout if that is new to the receiver, and the bytes of every
tensor. A known layout is sent as a number; a new one needs no handshake.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from pipebench.engine.structure import Structure, flatten, from_words, to_words, unflatten
from pipebench.model.memory_format import is_channels_last, shaped

ALIGNMENT = 64  # bytes; suits tensors of any type
HEADER_BYTES = 64
_OF_TENSOR = 5  # entries of a tensor in a `LayoutKey`; other values have two
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Header(NamedTuple):
    """The start of a message."""

    unit: int  # of the values
    layout: int  # number of the layout on the channel
    text_bytes: int  # length of the layout's text that follows; 0 if the receiver has it
    num_bytes: int  # size of the whole message
    spilled: int  # 1 if the rest comes separately, because the receiver's buffer is too small
    sent_s: float  # on the run's clock
    note: float  # a number sent with it: the latest loss known to the sender
    taken: int = 0  # messages of the other direction that the sender has taken


_HEADER = struct.Struct("<5q2dq")
assert _HEADER.size == HEADER_BYTES


def write_header(buffer: torch.Tensor, header: Header) -> None:
    """Write a header at the start of a buffer of bytes on the CPU."""
    data: Any = buffer.numpy()  # NumPy's types don't declare the buffer interface
    _HEADER.pack_into(data, 0, *header)


def read_header(buffer: torch.Tensor) -> Header:
    """Read the header at the start of a buffer of bytes on the CPU."""
    data: Any = buffer.numpy()
    return Header(*_HEADER.unpack_from(data, 0))


def pack(data: torch.Tensor, text: bytes, places: Iterable[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Write a message without its header: the layout's text, and the tensors.

    Args:
        data: the message: [bytes] uint8.
        text: the layout's, empty if the receiver has it.
        places: the tensors' views of `data`.
        tensors: as many.
    """
    if text:
        data[HEADER_BYTES : HEADER_BYTES + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor.detach())


def layout_in(data: torch.Tensor, header: Header, known: list["MessageLayout"]) -> tuple["MessageLayout", int]:
    """Return a message's layout and the start of its tensors; a new layout is appended to `known`, the channel's."""
    start = HEADER_BYTES + header.text_bytes
    if header.text_bytes:
        known.append(MessageLayout.from_text(data[HEADER_BYTES:start].numpy().tobytes()))
    return known[header.layout], start


@dataclass(frozen=True)
class TensorLeaf:
    """One tensor of a message."""

    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    last: bool  # whether its memory is in the order of channels last
    on_host: bool  # whether the sender has it on its host, rather than on a GPU
    offset: int  # of its first byte, after the layout's text
    num_bytes: int

    def of(self, run: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor of its numbers in this tensor's shape and order of memory."""
        return shaped(run, self.shape, last=self.last)


@dataclass(frozen=True)
class MessageLayout:
    """The structure of a message's values."""

    structure: Structure  # the leaves' containers
    leaves: tuple[Any, ...]  # a `TensorLeaf` for a tensor, or any other value itself (a number, text, a device)
    num_bytes: int  # of all tensors, alignment included
    payload_bytes: int  # of all tensors

    @cached_property
    def tensors(self) -> tuple[TensorLeaf, ...]:
        """The leaves that are tensors."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorLeaf))

    def to_text(self) -> bytes:
        """Return the layout as text, padded so that the tensors after it are aligned."""
        leaves = [
            [str(leaf.dtype), list(leaf.shape), leaf.requires_grad, leaf.last, leaf.on_host]
            if isinstance(leaf, TensorLeaf)
            else _in_words(leaf)
            for leaf in self.leaves
        ]
        text = json.dumps([to_words(self.structure), leaves]).encode()
        return text.ljust(aligned(len(text)))

    @staticmethod
    def from_text(text: bytes) -> "MessageLayout":
        """Read the text from `to_text`; raises a CrossingError if it names an unknown class."""
        structure, given = json.loads(text)
        leaves: list[Any] = []
        for leaf in given:
            if isinstance(leaf, dict):
                leaves.append(_from_words(**leaf))
            else:
                leaves.append((_DTYPES[leaf[0]], torch.Size(leaf[1]), *leaf[2:]))
        return _laid_out(from_words(structure), leaves)

    def views(self, data: Any, start: int = 0) -> list[torch.Tensor]:
        """Return each tensor's view of a message.

        Each view has a storage of its own, which references the bytes. So autograd counts their versions separately.

        Args:
            data: a NumPy array of the message's bytes.
            start: the byte at which the tensors begin.
        """
        return [
            leaf.of(torch.frombuffer(data, dtype=leaf.dtype, count=count, offset=start + leaf.offset))
            if (count := leaf.shape.numel())
            else torch.empty(leaf.shape, dtype=leaf.dtype)
            for leaf in self.tensors
        ]

    def values(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Rebuild the values from their tensors, with `requires_grad` as sent."""
        remaining = iter(tensors)
        leaves = (
            next(remaining).requires_grad_(leaf.requires_grad) if isinstance(leaf, TensorLeaf) else leaf
            for leaf in self.leaves
        )
        return unflatten(self.structure, leaves)


class LayoutKey(NamedTuple):
    """A hashable key of a message's layout, which takes less time to make than the layout."""

    structure: Structure  # the leaves' containers
    # Of a tensor the first five fields of its `TensorLeaf`. Of another value its type and itself: 1, 1.0 and True are
    # equal keys of a dictionary, but not the same value
    leaves: tuple[tuple[Any, ...], ...]

    def layout(self) -> MessageLayout:
        """Return the layout."""
        return _laid_out(self.structure, [leaf if len(leaf) == _OF_TENSOR else leaf[1] for leaf in self.leaves])


class Layouts:
    """The layouts sent on a channel."""

    def __init__(self) -> None:
        self._known: dict[LayoutKey, tuple[int, MessageLayout]] = {}

    def of(self, key: LayoutKey) -> tuple[int, MessageLayout, bytes]:
        """Return a key's number and layout, and the layout's text if new to the receiver."""
        known = self._known.get(key)
        if known is not None:
            return *known, b""
        self._known[key] = number, layout = len(self._known), key.layout()
        return number, layout, layout.to_text()


def layout_key_of(values: Any) -> tuple[LayoutKey, list[torch.Tensor]]:
    """Return the key of values' layout, and their tensors; raises a CrossingError if a value can't be sent."""
    leaves, structure = flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    shaped = [
        (leaf.dtype, leaf.shape, leaf.requires_grad, is_channels_last(leaf), leaf.is_cpu)
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), leaf)
        for leaf in leaves
    ]
    return LayoutKey(structure, tuple(shaped)), tensors


def aligned(num_bytes: int) -> int:
    """Round up to the next aligned offset."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _in_words(leaf: Any) -> dict[str, Any]:
    """Return a value other than a tensor as JSON."""
    if isinstance(leaf, torch.dtype):
        return {"dtype": str(leaf)}
    return {"device": leaf.type} if isinstance(leaf, torch.device) else {"value": leaf}


def _from_words(value: Any = None, dtype: str = "", device: str = "") -> Any:
    """Return the value given to `_in_words`; a GPU becomes the receiver's own."""
    if dtype:
        return _DTYPES[dtype]
    if device:
        return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    return value


def _laid_out(structure: Structure, shaped: Sequence[Any]) -> MessageLayout:
    leaves: list[Any] = []
    end, payload = 0, 0
    for leaf in shaped:
        if isinstance(leaf, tuple):
            dtype, shape, requires_grad, last, on_host = leaf
            num_bytes = shape.numel() * dtype.itemsize
            leaves.append(TensorLeaf(dtype, shape, requires_grad, last, on_host, end, num_bytes))
            end, payload = end + aligned(num_bytes), payload + num_bytes
        else:
            leaves.append(leaf)
    return MessageLayout(structure, tuple(leaves), end, payload)
