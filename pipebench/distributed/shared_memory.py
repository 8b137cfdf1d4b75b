"""Channels between workers of one host: values stand in memory that both see, so they are copied once, by their sender.

A sender has slots, pieces of memory that the receiver maps too. It copies a message's tensors into one that is free and
writes a record of it into a pipe; what the receiver gets are tensors in that very slot. When the last of them is gone,
which for an activation is when its graph is, the receiver writes the slot's number into a pipe that goes back, and the
slot is free again. Nobody but the two is needed: no thread carries bytes, and who waits is woken by the system.

Nothing is posted and nothing blocks a sender, but that it may be told not to run too far ahead: it makes a new slot
where none is free, and a pipe holds thousands of records. Slots and pipes have no names: when the processes end,
however they end, they are gone. Linux only: the other end opens them by /proc.
"""

import fcntl
import mmap
import os
import select
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipebench.distributed.channel import Message
from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.message import Layout, Layouts, form_of
from pipebench.distributed.world import World

# Slot, its file descriptor at the sender's, its size, unit, number of the layout, bytes of the layout in words that
# follow, when it was handed over, the note.
_RECORD = struct.Struct("<6q2d")
_TOKEN = struct.Struct("<i")
_TAKEN = -1  # instead of a slot that is free: a message was taken
_MANY = 1 << 16  # bytes that a pipe is read by
_PIPE_BYTES = 1 << 20  # the most that anybody may ask for: records of 16,384 messages


class _Slot:
    """A piece of memory that two processes see.

    Args:
        file: its file descriptor; it may be closed afterwards.
        num_bytes: its size.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        self._places: dict[int, list[torch.Tensor]] = {}

    def places(self, number: int, layout: Layout) -> list[torch.Tensor]:
        """Return where the tensors of a layout stand; `number` is the layout's."""
        found = self._places.get(number)
        if found is None:
            found = self._places[number] = layout.views(self.bytes.numpy())
        return found


class SharedSender:
    """The sending end; used like `channel.Sender`.

    Args:
        records: the pipe that it writes to, a file descriptor.
        tokens: the pipe that it hears from.
        clock: the run's clock, seconds.
        limit_s: how long a wait may take before the receiver counts as lost.
    """

    def __init__(self, records: int, tokens: int, clock: Callable[[], float], limit_s: float) -> None:
        self._records, self._tokens = records, _Pipe(tokens, limit_s)
        self._clock = clock
        self._layouts = Layouts()
        self._slots: list[_Slot] = []
        self._files: list[int] = []
        self._free: list[int] = []
        self._num_sent = self._num_taken = 0
        self._largest = 0

    def send(self, unit: int, values: Any, note: float, most_leaving: int | None = None, taken: int = 0) -> int:
        """Hand over a message; return its payload in bytes.

        Args:
            unit: the unit whose values these are.
            values: a pytree of tensors.
            note: a number that travels along.
            most_leaving: wait until earlier messages are taken where that many aren't; None never waits.
            taken: not needed: the receiver says itself what is free.

        Raises:
            PeerLostError: the receiver is gone.
        """
        self._hear(self._tokens.there_is())
        while most_leaving is not None and self._num_sent - self._num_taken >= most_leaving:
            self._hear(self._tokens.some())
        form, tensors = form_of(values)
        number, layout, text = self._layouts.of(form)
        index = self._take(layout.num_bytes)
        slot = self._slots[index]
        for place, tensor in zip(slot.places(number, layout), tensors, strict=True):
            place.copy_(tensor.detach())
        size = len(slot.bytes)
        record = _RECORD.pack(index, self._files[index], size, unit, number, len(text), self._clock(), note)
        _write(self._records, record + text)
        self._num_sent += 1
        return layout.payload_bytes

    def taken(self, num_messages: int) -> None:
        """Nothing is to be done: the receiver says itself what is free."""

    def flush(self) -> None:
        """Nothing is to be done: what was sent is where the receiver finds it."""

    def close(self) -> None:
        """Give up the pipes, and what slots are named by; who has values in a slot keeps it."""
        for file in (self._records, self._tokens.file, *self._files):
            os.close(file)

    def _hear(self, tokens: bytes) -> None:
        for (token,) in _TOKEN.iter_unpack(tokens):
            if token == _TAKEN:
                self._num_taken += 1
            else:
                self._free.append(token)

    def _take(self, num_bytes: int) -> int:
        """Return a free slot that is large enough, the latest to become free; a new one where there is none."""
        for position in range(len(self._free) - 1, -1, -1):
            if len(self._slots[self._free[position]].bytes) >= num_bytes:
                return self._free.pop(position)
        self._largest = max(self._largest, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
        file = os.memfd_create("pipebench")
        os.ftruncate(file, self._largest)
        self._slots.append(_Slot(file, self._largest))
        self._files.append(file)
        return len(self._slots) - 1


class SharedReceiver:
    """The receiving end; used like `channel.Receiver`.

    Args:
        peer: the sender's process.
        records: the pipe that it reads from, a file descriptor.
        tokens: the pipe that it writes to.
        clock: the run's clock, seconds.
        limit_s: how long a wait may take before the sender counts as lost.

    Attributes:
        num_taken: messages received so far.
    """

    def __init__(self, peer: int, records: int, tokens: int, clock: Callable[[], float], limit_s: float) -> None:
        self.num_taken = 0
        self._peer = peer
        self._records, self._tokens = _Pipe(records, limit_s), tokens
        self._clock = clock
        self._layouts: list[Layout] = []
        self._slots: dict[int, _Slot] = {}
        self._process = os.getpid()

    def expect(self, num_messages: int) -> None:
        """Nothing is to be done: a slot is there as soon as a message is."""

    def receive(self, unit: int) -> Message:
        """Wait for the next message, which must be about this unit.

        Raises:
            PeerLostError: the sender is gone.
        """
        record = self._records.exactly(_RECORD.size)
        index, file, num_bytes, about, number, text_bytes, sent_s, note = _RECORD.unpack(record)
        if text_bytes:
            self._layouts.append(Layout.from_text(self._records.exactly(text_bytes)))
        if about != unit:
            raise AssertionError(f"process {self._peer} sent unit {about} where unit {unit} was awaited")
        slot = self._slots.get(index)
        if slot is None:
            slot = self._slots[index] = self._open(file, num_bytes)
        self._tell(_TAKEN)
        self.num_taken += 1
        arrived_s = self._clock()
        layout = self._layouts[number]
        data = slot.bytes.numpy()  # another view every time: it lasts as long as the tensors in it
        weakref.finalize(data, self._tell, index).atexit = False
        values = layout.values(layout.views(data))
        return Message(values, layout.payload_bytes, sent_s, arrived_s, note, 0)

    def close(self) -> None:
        """Give up the pipes; values that are still held stay what they are."""
        self._process = 0
        os.close(self._records.file)
        os.close(self._tokens)

    def _open(self, file: int, num_bytes: int) -> _Slot:
        try:
            here = _open(self._peer, file, os.O_RDWR)
        except OSError as error:
            raise PeerLostError(f"lost a peer: process {self._peer} is gone ({error.strerror})") from error
        slot = _Slot(here, num_bytes)
        os.close(here)
        return slot

    def _tell(self, token: int) -> None:
        """Tell the sender; a sender that is gone is missed by who waits for it. A forked process has nothing to say."""
        if self._process == os.getpid():
            try:
                os.write(self._tokens, _TOKEN.pack(token))
            except BrokenPipeError:
                return


class _Pipe:
    """The end of a pipe that is read."""

    def __init__(self, file: int, limit_s: float) -> None:
        self.file = file
        self._limit_ms = 1000 * limit_s
        os.set_blocking(file, False)
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)

    def there_is(self, most: int = _MANY) -> bytes:
        """Return what is there already, perhaps nothing."""
        try:
            found = os.read(self.file, most)
        except BlockingIOError:
            return b""
        if not found:
            raise PeerLostError("lost a peer: the process at the other end of a pipe is gone")
        return found

    def some(self, most: int = _MANY) -> bytes:
        """Wait for something."""
        while not (found := self.there_is(most)):
            if not self._poll.poll(self._limit_ms):
                raise PeerLostError(f"lost a peer: nothing came within {self._limit_ms / 1000:g} s")
        return found

    def exactly(self, num_bytes: int) -> bytes:
        """Wait for so many bytes."""
        found = self.some(num_bytes)
        while len(found) < num_bytes:
            found += self.some(num_bytes - len(found))
        return found


Ends = tuple[SharedSender | None, SharedReceiver | None]


def can_share(world: World) -> bool:
    """Say whether a world's processes may see the same memory; the same for all."""
    return world.shares_memory and world.place.one_host and world.device.type == "cpu" and hasattr(os, "memfd_create")


def connect(world: World, pairs: Sequence[tuple[int, int]], clock: Callable[[], float]) -> list[Ends] | None:
    """Join pairs of workers, the sender's rank and the receiver's; all workers call it with the same pairs.

    Args:
        world: the processes.
        pairs: of ranks; a pair may be there several times.
        clock: the run's clock, seconds.

    Returns:
        Per pair the end that this worker has, or neither; None if the system doesn't let processes share memory.

    Raises:
        PeerLostError: a worker is gone.
    """
    if not can_share(world):
        return None
    # Each makes the pipes that it reads, and opens those that it writes.
    own = {index: os.pipe() for index, pair in enumerate(pairs) if world.rank in pair}
    for _, writes in own.values():
        _widen(writes)
    offers = world.exchange([os.getpid(), [[index, writes] for index, (_, writes) in own.items()]])
    written: dict[int, int] = {}
    for index in own:
        sender, receiver = pairs[index]
        process, theirs = offers[receiver if world.rank == sender else sender]
        try:
            written[index] = _open(process, dict(map(tuple, theirs))[index], os.O_WRONLY)
        except OSError:
            break
    joined = all(world.exchange(len(written) == len(own)))
    for _, writes in own.values():
        os.close(writes)  # the other end is the only one: when its process is gone, the pipe ends
    if not joined:
        for file in (*written.values(), *(reads for reads, _ in own.values())):
            os.close(file)
        return None
    ends: list[Ends] = []
    for index, (sender, receiver) in enumerate(pairs):
        if world.rank == sender:
            ends.append((SharedSender(written[index], own[index][0], clock, world.operation_limit_s), None))
        elif world.rank == receiver:
            peer = offers[sender][0]
            mine = SharedReceiver(peer, own[index][0], written[index], clock, world.operation_limit_s)
            ends.append((None, mine))
        else:
            ends.append((None, None))
    return ends


def _widen(pipe: int) -> None:
    """Let a pipe hold more; where the system says no, it holds what it does."""
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        return


def _open(process: int, file: int, mode: int) -> int:
    return os.open(f"/proc/{process}/fd/{file}", mode | os.O_CLOEXEC)


def _write(pipe: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except BrokenPipeError as error:
        raise PeerLostError("lost a peer: the process at the other end of a pipe is gone") from error
