"""Messages: values of any structure as one run of bytes, and back.

A message is a header of eight integers, the layout of its values in words where the receiver hasn't seen it before,
and the bytes of every tensor. Shapes that come again travel as a number; new ones need no question and no answer.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from pipebench.engine.structure import Structure, flatten, from_words, to_words, unflatten

ALIGNMENT = 64  # bytes: every tensor begins where any type may
HEADER_BYTES = 64
_OF_TENSOR = 3  # what a form says of a tensor; of anything else it says two things
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Header(NamedTuple):
    """What stands first in a message.

    Attributes:
        unit: the unit whose values these are.
        layout: number of the layout, counted on the channel.
        text_bytes: length of the layout in words that follows; 0 if the receiver has it.
        num_bytes: length of the whole message.
        spilled: 1 if the rest comes apart, because the receiver's buffer is too small for it.
        sent_s: when it was handed over, on the run's clock.
        note: a number that travels along: the latest loss the sender knows.
        taken: how many messages the sender has taken of those that come the other way: they have left their sender.
    """

    unit: int
    layout: int
    text_bytes: int
    num_bytes: int
    spilled: int
    sent_s: float
    note: float
    taken: int = 0


_HEADER = struct.Struct("<5q2dq")
assert _HEADER.size == HEADER_BYTES


def write_header(buffer: torch.Tensor, header: Header) -> None:
    """Write a header at the start of a buffer of bytes on the CPU."""
    data: Any = buffer.numpy()  # NumPy's types don't say that it is one
    _HEADER.pack_into(data, 0, *header)


def read_header(buffer: torch.Tensor) -> Header:
    """Read the header at the start of a buffer of bytes on the CPU."""
    data: Any = buffer.numpy()
    return Header(*_HEADER.unpack_from(data, 0))


def pack(
    data: torch.Tensor, header: Header, text: bytes, places: Iterable[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """Write a whole message: header, layout in words, and tensors into their places in the same bytes."""
    write_header(data, header)
    if text:
        data[HEADER_BYTES : HEADER_BYTES + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor.detach())


def layout_in(data: torch.Tensor, header: Header, known: list["MessageLayout"]) -> tuple["MessageLayout", int]:
    """Return the layout of a message and where its tensors begin; `known` are its channel's so far, and learns it."""
    start = HEADER_BYTES + header.text_bytes
    if header.text_bytes:
        known.append(MessageLayout.from_text(data[HEADER_BYTES:start].numpy().tobytes()))
    return known[header.layout], start


@dataclass(frozen=True)
class Leaf:
    """One tensor of a message: its type, shape, whether a gradient comes back for it, where it begins."""

    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class MessageLayout:
    """The structure of a message's values.

    Attributes:
        structure: what holds the leaves.
        leaves: one per leaf: a tensor's, or whatever else it is (a number, text, a device), part of the layout.
        num_bytes: of all tensors together, with the gaps that align them.
        payload_bytes: of all tensors together.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    num_bytes: int
    payload_bytes: int

    @cached_property
    def tensors(self) -> tuple[Leaf, ...]:
        """The leaves that are tensors."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Leaf))

    def to_text(self) -> bytes:
        """Return the layout in words, padded so that what follows it is aligned."""
        leaves = [
            [str(leaf.dtype), list(leaf.shape), leaf.requires_grad] if isinstance(leaf, Leaf) else _in_words(leaf)
            for leaf in self.leaves
        ]
        text = json.dumps([to_words(self.structure), leaves]).encode()
        return text.ljust(aligned(len(text)))

    @staticmethod
    def from_text(text: bytes) -> "MessageLayout":
        """Read what `to_text` wrote.

        Raises:
            CrossingError: it names a class that isn't known here.
        """
        structure, given = json.loads(text)
        leaves: list[Any] = []
        for leaf in given:
            if isinstance(leaf, dict):
                leaves.append(_from_words(**leaf))
            else:
                leaves.append((_DTYPES[leaf[0]], torch.Size(leaf[1]), leaf[2]))
        return _laid_out(from_words(structure), leaves)

    def views(self, data: Any, start: int = 0) -> list[torch.Tensor]:
        """Return every tensor's place in some bytes on the CPU, in the tensor's type and shape.

        Each has a storage of its own, as large as itself, and keeps the bytes alive: autograd counts neither the
        header's bytes nor what happens to another tensor of the message as its own.

        Args:
            data: NumPy's view of the bytes of a message.
            start: where its tensors begin.
        """
        return [
            torch.frombuffer(data, dtype=leaf.dtype, count=count, offset=start + leaf.offset).view(leaf.shape)
            if (count := leaf.shape.numel())
            else torch.empty(leaf.shape, dtype=leaf.dtype)
            for leaf in self.tensors
        ]

    def values(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put the structure together again from its tensors, which keep whether a gradient comes back for them."""
        remaining = iter(tensors)
        leaves = (
            next(remaining).requires_grad_(leaf.requires_grad) if isinstance(leaf, Leaf) else leaf
            for leaf in self.leaves
        )
        return unflatten(self.structure, leaves)


class Form(NamedTuple):
    """What two messages of one layout have in common; made quickly, to be looked up by.

    Attributes:
        structure: what holds the leaves.
        leaves: one per leaf: a tensor's type, shape and whether a gradient comes back for it; of anything else
            its type, since 1, 1.0 and True are equal and not the same, and what it is.
    """

    structure: Structure
    leaves: tuple[tuple[Any, ...], ...]

    def layout(self) -> MessageLayout:
        """Return where everything is."""
        return _laid_out(self.structure, [leaf if len(leaf) == _OF_TENSOR else leaf[1] for leaf in self.leaves])


class Layouts:
    """The layouts that a channel's sender has sent."""

    def __init__(self) -> None:
        self._known: dict[Form, tuple[int, MessageLayout]] = {}

    def of(self, form: Form) -> tuple[int, MessageLayout, bytes]:
        """Return a form's number and layout, and the layout in words if the receiver doesn't know it."""
        known = self._known.get(form)
        if known is not None:
            return *known, b""
        self._known[form] = number, layout = len(self._known), form.layout()
        return number, layout, layout.to_text()


def form_of(values: Any) -> tuple[Form, list[torch.Tensor]]:
    """Return the form of some values, and their tensors.

    Raises:
        CrossingError: something that can't be handed to another stage is among them.
    """
    leaves, structure = flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    shaped = [
        (leaf.dtype, leaf.shape, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
        for leaf in leaves
    ]
    return Form(structure, tuple(shaped)), tensors


def aligned(num_bytes: int) -> int:
    """Round up to a place where a tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _in_words(leaf: Any) -> dict[str, Any]:
    """Return what isn't a tensor as JSON."""
    if isinstance(leaf, torch.dtype):
        return {"dtype": str(leaf)}
    return {"device": leaf.type} if isinstance(leaf, torch.device) else {"value": leaf}


def _from_words(value: Any = None, dtype: str = "", device: str = "") -> Any:
    """Return what `_in_words` was given; the sender's GPU is the receiver's own here, where its tensors are."""
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
            dtype, shape, requires_grad = leaf
            num_bytes = shape.numel() * dtype.itemsize
            leaves.append(Leaf(dtype, shape, requires_grad, end, num_bytes))
            end, payload = end + aligned(num_bytes), payload + num_bytes
        else:
            leaves.append(leaf)
    return MessageLayout(structure, tuple(leaves), end, payload)
