"""Channels: one-way, ordered flows of messages between two workers, received ahead and sent in the background.

A message goes into a buffer that the receiver posted earlier, so it travels while both sides compute. Both ends derive
buffer sizes from earlier messages by one rule. Activations and gradients have separate channels and tags, so that
neither waits for the other.

A send returns at once and owns its buffer until the message has left. Gloo reports that only to a wait, so every
message carries the number of messages taken the other way, and buffers are reused by that. All messages are waited for
before the process group ends. Received tensors own the posted buffer; the next receive gets a new one.

What the sender has on its host arrives on the receiver's: packed sequences' lengths, for example, mustn't be on a GPU.

By NCCL, torch records an event before and after an operation on its stream of a group, if the group times its
operations (`World.new_group`). A send begins when its stream has come to it and ends when its tensor is received or in
NCCL's buffers. So the sending GPU's clock alone times a message, without one more stream for each channel: streams
beyond CUDA's hardware queues would wait for each other.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed import message
from pipebench.distributed.ends import Received, ReceivingEnd, SendingEnd
from pipebench.distributed.instruction_times import HostTimer
from pipebench.distributed.launch_join import peers
from pipebench.model.memory_format import as_bytes, in_order


class DirectSends:
    """What a channel sends by NCCL to `peer` in the group of the two workers; `timer` times it, None times nothing."""

    def __init__(self, group: Any, peer: int, timer: HostTimer | None) -> None:
        self._group, self._peer, self._timer = group, peer, timer
        self._leaving: deque[tuple[list[Any], list[torch.Tensor]]] = deque()  # the device still reads the tensors
        self._starts_s, self._lasted_s = array("d"), array("d")

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, in order, when all computing until here is done."""
        self._drop_sent()
        leaving = [as_bytes(in_order(tensor.detach())) for tensor in tensors]  # NCCL doesn't know all types, as int16
        if self._timer is not None:
            start = self._timer.mark()
            self._timer.then(lambda: self._starts_s.append(start.s))
        with peers():
            works = [dist.isend(tensor, self._peer, group=self._group) for tensor in leaving]
        self._leaving.append((works, leaving))

    def flush(self) -> None:
        """Let later computing wait until everything has left."""
        with peers():
            for works, _ in self._leaving:
                for work in works:
                    work.wait()
        if self._timer is None:
            self._leaving.clear()

    def times_s(self) -> list[float]:
        """Return of every message since the last call when it could leave, and how long it took from then.

        Everything is sent, and all moments are known.
        """
        self._drop_sent()
        found, end_s = list[float](), 0.0
        for start_s, lasted_s in zip(self._starts_s, self._lasted_s, strict=True):
            end_s = max(start_s, end_s) + lasted_s  # one after the other
            found.extend((start_s, end_s - start_s))
        self._starts_s, self._lasted_s = array("d"), array("d")
        return found

    def _drop_sent(self) -> None:
        with peers():
            while self._leaving and all(work.is_completed() for work in self._leaving[0][0]):
                works, _ = self._leaving.popleft()
                if self._timer is not None:
                    self._lasted_s.append(sum(work._get_duration() for work in works) / 1e3)


AHEAD = 2  # receives posted before they are waited for; more would only take memory
# Gloo locks the connection of two ranks while bytes arrive: posting the receive after next would wait for them, a
# millisecond per megabyte. With as many connections, in turn, the one that is posted to is idle.
LANES = AHEAD
_ROOM_FOR_TEXT = 2048  # bytes in the first buffers for layout texts


@dataclass(frozen=True)
class ChannelLink:
    """A connection between two workers."""

    peer: int  # the other worker's rank
    lanes: Sequence[Any]  # Gloo groups of all ranks, only for messages, used in turn
    tag: int  # of this direction and kind of message
    direct: Any  # the two workers' NCCL group for tensors; None if they travel inside the messages
    device: torch.device  # of the values
    clock: Callable[[], float]  # the run's clock, seconds
    # With NCCL on a GPU: a stream that stays empty (tests pass a fake one), and what times its work
    idle: Any = None
    timer: HostTimer | None = None
    pins: bool = True  # buffers that a GPU copies to or from

    @property
    def spill_tag(self) -> int:
        """Tag of the rest of a message too large for the posted buffer."""
        return self.tag + 1

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return a new buffer of bytes on the CPU, usually pinned if a GPU copies to or from it."""
        is_copied = self.device.type == "cuda" and self.direct is None
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_copied and self.pins)


class _Capacity:
    """The size of the buffer posted for the next message: the largest message so far.

    The receiver posts message j's buffer after taking message j - AHEAD, so the sender ignores the sizes of the last
    AHEAD - 1 messages. Between segments the receiver knows of more messages and posts larger buffers than assumed.
    """

    def __init__(self, first_bytes: int, leave_out: int) -> None:
        self._latest: deque[int] = deque([0] * leave_out)
        self.now = message.HEADER_BYTES + _ROOM_FOR_TEXT + message.aligned(first_bytes)

    def count(self, num_bytes: int) -> None:
        """Count a message of this size, sent or taken."""
        self._latest.append(num_bytes)
        self.now = max(self.now, self._latest.popleft())


@dataclass
class _Buffer:
    """Bytes of a message, with the tensors' views of it by layout."""

    data: torch.Tensor
    views: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def places(self, layout: message.MessageLayout, number: int, start: int) -> list[torch.Tensor]:
        """Return the views of layout `number`'s tensors in a message whose tensors begin at `start`."""
        found = self.views.get((number, start))
        if found is None:
            found = self.views[number, start] = layout.views(self.data.numpy(), start)
        return found


class ChannelSender(SendingEnd):
    """The sending end; `first_bytes` is the expected size of values."""

    def __init__(self, link: ChannelLink, first_bytes: int) -> None:
        self._link = link
        self._capacity = _Capacity(first_bytes, AHEAD - 1)
        self._layouts = message.Layouts()
        self._leaving: deque[tuple[_Buffer, list[Any]]] = deque()
        self._num_left = 0
        self._direct = None if link.direct is None else DirectSends(link.direct, link.peer, link.timer)
        self._free: list[_Buffer] = []
        self._num_sent = 0

    def send(self, unit: int, values: Any, note: float, most_leaving: int | None = None, taken: int = 0) -> int:
        """Send a message; see `SendingEnd`."""
        while most_leaving is not None and len(self._leaving) >= most_leaving:
            self._wait_for_first()
        key, tensors = message.layout_key_of(values)
        number, layout, text = self._layouts.of(key)
        body_bytes = 0 if self._link.direct is not None else layout.num_bytes
        num_bytes = message.HEADER_BYTES + len(text) + body_bytes
        spills = num_bytes > self._capacity.now
        self._capacity.count(num_bytes)
        buffer = self._take(num_bytes)
        places = buffer.places(layout, number, message.HEADER_BYTES + len(text)) if body_bytes else ()
        message.pack(buffer.data, text, places, tensors if body_bytes else ())
        # Copying waits for a GPU: only now is the message ready.
        header = message.Header(unit, number, len(text), num_bytes, int(spills), self._link.clock(), note, taken)
        message.write_header(buffer.data, header)
        cuts = [(0, message.HEADER_BYTES, self._link.tag), (message.HEADER_BYTES, num_bytes, self._link.spill_tag)]
        pieces = cuts if spills else [(0, num_bytes, self._link.tag)]
        lane = self._link.lanes[self._num_sent % len(self._link.lanes)]
        self._num_sent += 1
        with peers():
            works = [dist.isend(buffer.data[a:b], self._link.peer, group=lane, tag=tag) for a, b, tag in pieces]
            self._leaving.append((buffer, works))
        if self._direct is not None:
            self._direct.send([tensor.to(self._link.device) for tensor in tensors])  # NCCL has no others
        return layout.payload_bytes

    def taken(self, num_messages: int) -> None:
        """Reuse the buffers of the first `num_messages` messages, which the receiver has taken."""
        while self._num_left < num_messages:
            self._wait_for_first()

    def flush(self) -> None:
        """Wait until every message has left."""
        while self._leaving:
            self._wait_for_first()
        if self._direct is not None:
            self._direct.flush()

    def times_s(self) -> list[float]:
        """See `SendingEnd`."""
        return super().times_s() if self._direct is None else self._direct.times_s()

    def _wait_for_first(self) -> None:
        buffer, works = self._leaving.popleft()
        with peers():
            for work in works:
                work.wait()
        self._num_left += 1
        self._free.append(buffer)

    def _take(self, num_bytes: int) -> _Buffer:
        while self._free:
            buffer = self._free.pop()
            if len(buffer.data) >= num_bytes:  # smaller ones are dropped
                return buffer
        return _Buffer(self._link.buffer(max(num_bytes, self._capacity.now)))


class Receiver(ReceivingEnd):
    """The receiving end; arguments as for `ChannelSender`."""

    def __init__(self, link: ChannelLink, first_bytes: int) -> None:
        self._link = link
        self._capacity = _Capacity(first_bytes, 0)
        self._layouts: list[message.MessageLayout] = []
        self._posted: deque[tuple[Any, torch.Tensor, Any]] = deque()
        self._num_posted = 0
        self.num_taken = 0
        self._unposted = 0

    def expect(self, num_messages: int) -> None:
        """Post buffers for future messages, now and as others are received."""
        self._unposted += num_messages
        while self._unposted > 0 and len(self._posted) < AHEAD:
            self._post()

    def receive(self, unit: int | None) -> Received:
        """Wait for the next message; see `ReceivingEnd`."""
        if not self._posted:  # not announced by `expect`
            self.expect(1)
        work, buffer, lane = self._posted.popleft()
        self._wait(work)
        header = message.read_header(buffer)
        if unit is not None and header.unit != unit:
            raise AssertionError(
                f"rank {self._link.peer} sent unit {header.unit} (tag {self._link.tag}) where unit {unit} was awaited"
            )
        if header.spilled:
            buffer = self._spilled(header, lane)
        arrived_s = self._link.clock()
        layout, start = message.layout_in(buffer, header, self._layouts)
        self._capacity.count(header.num_bytes)
        self.expect(0)
        if self._link.direct is None:
            places = zip(layout.tensors, layout.views(buffer.numpy(), start), strict=True)
            tensors = [place if leaf.on_host else place.to(self._link.device) for leaf, place in places]
        else:
            tensors = self._directly(layout)
        self.num_taken += 1
        values = layout.values(tensors)
        return Received(header.unit, values, layout.payload_bytes, header.sent_s, arrived_s, header.note, header.taken)

    def _wait(self, work: Any) -> None:
        with peers():
            work.wait()

    def _spilled(self, header: message.Header, lane: Any) -> torch.Tensor:
        """Receive the rest of a message that did not fit the posted buffer."""
        buffer = self._link.buffer(header.num_bytes)
        with peers():
            rest = buffer[message.HEADER_BYTES : header.num_bytes]
            dist.recv(rest, self._link.peer, group=lane, tag=self._link.spill_tag)
        return buffer

    def _directly(self, layout: message.MessageLayout) -> list[torch.Tensor]:
        """Receive the tensors by NCCL; the device waits, and the host for what it gets.

        NCCL receives after the current stream's earlier work; on the idle stream that is nothing, so bytes arrive while
        the GPU computes. The GPU's later work waits for them, and so does reuse of the idle stream's memory.
        """
        link = self._link
        with peers(), nullcontext() if link.idle is None else torch.cuda.stream(link.idle):
            runs = [torch.empty(leaf.shape.numel(), dtype=leaf.dtype, device=link.device) for leaf in layout.tensors]
            works = [dist.irecv(as_bytes(run), link.peer, group=link.direct) for run in runs]
        for run, work in zip(runs, works, strict=True):
            self._wait(work)
            if link.idle is not None:
                run.record_stream(torch.cuda.current_stream(link.device))
        leaves = zip(layout.tensors, runs, strict=True)
        return [leaf.of(run.cpu() if leaf.on_host else run) for leaf, run in leaves]

    def _post(self) -> None:
        buffer = self._link.buffer(self._capacity.now)
        lane = self._link.lanes[self._num_posted % len(self._link.lanes)]
        self._num_posted += 1
        with peers():
            work = dist.irecv(buffer, self._link.peer, group=lane, tag=self._link.tag)
        self._posted.append((work, buffer, lane))
        self._unposted -= 1
