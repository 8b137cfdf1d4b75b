"""Channels between workers of one host through shared memory: only the sender copies values.

A sender has slots, pieces of a file in memory that the receiver maps. It copies a message's tensors into a free slot
and writes a record into a pipe. The receiver gets tensors that are views of the slot. When the last of them is
released (an activation is released with its graph), the receiver returns the slot's number through another pipe.

Sends never block, except on a limit of unsent messages: the sender makes a new slot if none is free, and a pipe holds
thousands of records. Slots and pipes have no names, so they end with the processes. Linux only: the other end opens
them by /proc.
"""

import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from pipebench.distributed.ends import Received, ReceivingEnd, SendingEnd
from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.message import Layouts, MessageLayout, layout_key_of
from pipebench.distributed.pipes import PipePair, join_pairs
from pipebench.distributed.world import World
from pipebench.model.memory_format import as_bytes, in_order

# Slot, the sender's file descriptor, start in the file, size, unit, number of the layout, bytes of the layout's text
# that follow; time of the send, note.
_RECORD = struct.Struct("<7q2d")
# The other way: the number of a slot that is free again, or `_TAKEN`, if a message was received.
_TOKEN = struct.Struct("<i")
_TAKEN = -1


def mapped(file: int, num_bytes: int, start: int = 0) -> torch.Tensor:
    """Map bytes of a file in memory, from the start of a page; the file may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(file, num_bytes, offset=start), dtype=torch.uint8)


def pages(num_bytes: int) -> int:
    """Return the size of the whole pages, at least one, for `num_bytes`."""
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def new_file(num_bytes: int) -> tuple[int, int]:
    """Return a new unnamed file in memory, and its size: whole pages, at least one."""
    file, size = os.memfd_create("pipebench"), pages(num_bytes)
    os.ftruncate(file, size)
    return file, size


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    data: Any = as_bytes(tensor).numpy()  # NumPy's types don't declare the buffer interface
    return memoryview(data)


class _Slot(NamedTuple):
    """A piece of the sender's file: start, at a page, and size, whole pages.

    The sender writes it without mapping it, since mapped pages count as its own memory.
    """

    start: int
    num_bytes: int


class SharedSender(SendingEnd):
    """The sending end; it needs no flush.

    Args:
        line: carries records to the receiver and tokens back.
        clock: the run's clock, seconds.
    """

    def __init__(self, line: PipePair, clock: Callable[[], float]) -> None:
        self._line = line
        self._clock = clock
        self._layouts = Layouts()
        self._file, self._end = new_file(0)
        self._slots: list[_Slot] = []
        self._free: list[int] = []  # slots, the latest freed last
        self._num_sent = self._num_taken = 0
        self._slot_bytes = 0  # size of new slots: that of the largest message

    def send(self, unit: int, values: Any, note: float, most_leaving: int | None = None, taken: int = 0) -> int:
        """Send a message; see `SendingEnd`."""
        self._hear(self._line.available())
        while most_leaving is not None and self._num_sent - self._num_taken >= most_leaving:
            self._hear(self._line.read_some())
        key, tensors = layout_key_of(values)
        number, layout, text = self._layouts.of(key)
        index = self._take(layout.num_bytes)
        slot = self._slots[index]
        for leaf, tensor in zip(layout.tensors, tensors, strict=True):
            if leaf.num_bytes:
                write(self._file, bytes_of(in_order(tensor.detach())), slot.start + leaf.offset)
        record = _RECORD.pack(index, self._file, *slot, unit, number, len(text), self._clock(), note)
        self._line.write(record + text)
        self._num_sent += 1
        return layout.payload_bytes

    def close(self) -> None:
        """Close the pipes and the file; received values keep their slots."""
        self._line.close()
        os.close(self._file)

    def _hear(self, tokens: bytes) -> None:
        for (token,) in _TOKEN.iter_unpack(tokens):
            if token == _TAKEN:
                self._num_taken += 1
            else:
                self._free.append(token)

    def _take(self, num_bytes: int) -> int:
        """Return the free slot that was freed last among those of sufficient size; a new one if there is none."""
        for position in range(len(self._free) - 1, -1, -1):
            if self._slots[self._free[position]].num_bytes >= num_bytes:
                return self._free.pop(position)
        self._slot_bytes = max(self._slot_bytes, pages(num_bytes))
        self._slots.append(_Slot(self._end, self._slot_bytes))
        self._end += self._slot_bytes
        os.ftruncate(self._file, self._end)
        return len(self._slots) - 1


class SharedReceiver(ReceivingEnd):
    """The receiving end; it needs no `expect`.

    Args:
        line: carries records from the sender and tokens back.
        clock: the run's clock, seconds.
    """

    def __init__(self, line: PipePair, clock: Callable[[], float]) -> None:
        self.num_taken = 0
        self._line = line
        self._clock = clock
        self._layouts: list[MessageLayout] = []
        self._slots: dict[int, torch.Tensor] = {}
        self._process = os.getpid()

    def receive(self, unit: int | None) -> Received:
        """Wait for the next message; see `ReceivingEnd`."""
        record = self._line.read_exactly(_RECORD.size)
        index, file, start, num_bytes, sent_unit, number, text_bytes, sent_s, note = _RECORD.unpack(record)
        if text_bytes:
            self._layouts.append(MessageLayout.from_text(self._line.read_exactly(text_bytes)))
        if unit is not None and sent_unit != unit:
            raise AssertionError(f"process {self._line.peer} sent unit {sent_unit} where unit {unit} was awaited")
        slot = self._slots.get(index)
        if slot is None:
            slot = self._slots[index] = self._open(file, num_bytes, start)
        self._tell(_TAKEN)
        self.num_taken += 1
        arrived_s = self._clock()
        layout = self._layouts[number]
        data = slot.numpy()  # a new view of the slot, which lives until the last of the message's tensors is released
        weakref.finalize(data, self._tell, index).atexit = False
        values = layout.values(layout.views(data))
        return Received(sent_unit, values, layout.payload_bytes, sent_s, arrived_s, note, 0)

    def close(self) -> None:
        """Close the pipes; received values stay valid."""
        self._process = 0
        self._line.close()

    def _open(self, file: int, num_bytes: int, start: int) -> torch.Tensor:
        here = self._line.open(file)
        slot = mapped(here, num_bytes, start)
        os.close(here)
        return slot

    def _tell(self, token: int) -> None:
        """Send the sender a token, except in a forked process. The next wait reports a lost sender."""
        if self._process == os.getpid():
            with suppress(PeerLostError):
                self._line.write(_TOKEN.pack(token))


def write(file: int, data: memoryview, start: int) -> None:
    """Write into a file in memory, at most two gigabytes at once."""
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


Ends = tuple[SharedSender | None, SharedReceiver | None]


def connect(world: World, pairs: Sequence[tuple[int, int]], clock: Callable[[], float]) -> list[Ends] | None:
    """Connect pairs of workers; all workers call it with the same pairs.

    Args:
        world: the workers.
        pairs: the sender's rank and the receiver's; a pair may occur several times.
        clock: the run's clock, seconds.

    Returns:
        This worker's end of every pair, if any; None on all workers if processes can't share memory.
    """
    lines = join_pairs(world, pairs)
    if lines is None:
        return None
    ends: list[Ends] = [(None, None)] * len(pairs)
    for index, line in lines.items():
        is_sender = world.rank == pairs[index][0]
        ends[index] = (SharedSender(line, clock), None) if is_sender else (None, SharedReceiver(line, clock))
    return ends
