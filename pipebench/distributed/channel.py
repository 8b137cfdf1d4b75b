"""Channels: one-way, ordered flows of messages between two workers, received ahead and sent in the background.

A message goes into a buffer that the receiver posted earlier, so it travels while both sides compute. Both ends derive
buffer sizes from earlier messages by the same rule. Activations and gradients have separate channels and tags, so that
neither waits for the other.

A send returns at once, and its buffer stays in use until the message has left. Gloo says so only to a wait. To avoid
waits, every message carries the number of messages that its sender has received the other way; their buffers are free
again. All messages are waited for before the process group ends. Received tensors own the posted buffer; the next
receive gets a new one.

A tensor that the sender has on its host arrives on the receiver's host. Packed sequences' lengths, for example, mustn't
be on a GPU.

With NCCL, torch records an event before and after every operation of a group that times its operations
(`World.new_group`). A send begins when its stream reaches it, and ends when the tensor is received or in NCCL's
buffers. So the sending GPU's clock alone times a message. A further stream for each channel would be more than CUDA has
hardware queues for, and streams that share a queue wait for each other.
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
    """Sends a channel's tensors by NCCL.

    Args:
        group: the group of the two workers.
        peer: the receiver's rank.
        timer: times every message; None for no times.
    """

    def __init__(self, group: Any, peer: int, timer: HostTimer | None) -> None:
        self._group, self._peer, self._timer = group, peer, timer
        # Messages that the device may still read: operations, and the tensors that they send.
        self._leaving: deque[tuple[list[Any], list[torch.Tensor]]] = deque()
        # Of every message since the last `times_s`: when it could leave, on the run's clock, and its duration.
        self._starts_s, self._durations_s = array("d"), array("d")

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, in their order, when the computations launched so far are done."""
        self._drop_sent()
        leaving = [as_bytes(in_order(tensor.detach())) for tensor in tensors]  # NCCL doesn't know all types: no int16
        if self._timer is not None:
            start = self._timer.mark()
            self._timer.then(lambda: self._starts_s.append(start.s))
        with peers():
            works = [dist.isend(tensor, self._peer, group=self._group) for tensor in leaving]
        self._leaving.append((works, leaving))

    def flush(self) -> None:
        """Let later computations wait until everything has left."""
        with peers():
            for works, _ in self._leaving:
                for work in works:
                    work.wait()
        if self._timer is None:
            self._leaving.clear()

    def times_s(self) -> list[float]:
        """Return, of every message since the last call, when it could leave and how long it took from then.

        To be called when everything has been sent, and all moments are known.
        """
        self._drop_sent()
        found, end_s = list[float](), 0.0
        for start_s, duration_s in zip(self._starts_s, self._durations_s, strict=True):
            end_s = max(start_s, end_s) + duration_s  # messages leave one after the other
            found.extend((start_s, end_s - start_s))
        self._starts_s, self._durations_s = array("d"), array("d")
        return found

    def _drop_sent(self) -> None:
        with peers():
            while self._leaving and all(work.is_completed() for work in self._leaving[0][0]):
                works, _ = self._leaving.popleft()
                if self._timer is not None:
                    self._durations_s.append(sum(work._get_duration() for work in works) / 1e3)


AHEAD = 2  # receives posted before they are waited for; more would only take memory
# Connections between two workers that messages use in turn. Gloo locks a connection while bytes arrive on it, a
# millisecond per megabyte. Posting the receive after next on the same connection would wait for the lock.
LANES = AHEAD
_ROOM_FOR_TEXT = 2048  # bytes in the first buffers for layout texts


@dataclass(frozen=True)
class ChannelLink:
    """A connection between two workers."""

    peer: int  # the other worker's rank
    lanes: Sequence[Any]  # `LANES` Gloo groups of all ranks, only for messages, used in turn
    tag: int  # of this direction and kind of message
    direct: Any  # the two workers' NCCL group for tensors; None if tensors travel inside the messages
    device: torch.device  # of the values
    clock: Callable[[], float]  # the run's clock, seconds
    idle: Any = None  # with NCCL on a GPU, a stream on which nothing else is launched; tests pass a fake one
    timer: HostTimer | None = None  # with NCCL on a GPU, times messages
    pins: bool = True  # whether buffers that a GPU copies to or from are in pinned memory

    @property
    def spill_tag(self) -> int:
        """Tag of the rest of a message too large for the posted buffer."""
        return self.tag + 1

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return a new buffer on the CPU: [num_bytes] uint8."""
        is_copied = self.device.type == "cuda" and self.direct is None
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_copied and self.pins)


class _Capacity:
    """The size of the buffer posted for the next message: that of the largest message so far.

    The receiver posts message j's buffer after it has received message j - AHEAD. So the sender leaves out the sizes of
    the last AHEAD - 1 messages. After a segment the receiver may have posted larger buffers than the sender assumes.

    Args:
        first_bytes: expected size of the values.
        num_left_out: number of latest messages whose sizes don't count yet.
    """

    def __init__(self, first_bytes: int, num_left_out: int) -> None:
        self._latest: deque[int] = deque([0] * num_left_out)
        self.num_bytes = message.HEADER_BYTES + _ROOM_FOR_TEXT + message.aligned(first_bytes)

    def count(self, num_bytes: int) -> None:
        """Count a message of this size, sent or received."""
        self._latest.append(num_bytes)
        self.num_bytes = max(self.num_bytes, self._latest.popleft())


@dataclass
class _Buffer:
    """A buffer for messages, with the tensors' views of it."""

    data: torch.Tensor  # [bytes] uint8
    # By the layout's number and the byte where the tensors begin
    views: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def places(self, layout: message.MessageLayout, number: int, start: int) -> list[torch.Tensor]:
        """Return the views of layout `number`'s tensors in a message whose tensors begin at `start`."""
        found = self.views.get((number, start))
        if found is None:
            found = self.views[number, start] = layout.views(self.data.numpy(), start)
        return found


class ChannelSender(SendingEnd):
    """The sending end.

    Args:
        link: the connection.
        first_bytes: expected size of the values; buffers grow if they turn out to be larger.
    """

    def __init__(self, link: ChannelLink, first_bytes: int) -> None:
        self._link = link
        self._capacity = _Capacity(first_bytes, AHEAD - 1)
        self._layouts = message.Layouts()
        self._leaving: deque[tuple[_Buffer, list[Any]]] = deque()  # messages under way, with their operations
        self._num_left = 0  # messages that have been waited for
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
        spills = num_bytes > self._capacity.num_bytes
        self._capacity.count(num_bytes)
        buffer = self._take(num_bytes)
        places = buffer.places(layout, number, message.HEADER_BYTES + len(text)) if body_bytes else ()
        message.pack(buffer.data, text, places, tensors if body_bytes else ())
        # Written last, for the time of the send: copying from a GPU waits for it, so only now is the message ready.
        header = message.Header(unit, number, len(text), num_bytes, int(spills), self._link.clock(), note, taken)
        message.write_header(buffer.data, header)
        # Start, stop and tag of every piece: a message that doesn't fit the posted buffer is sent in two.
        pieces = [(0, num_bytes, self._link.tag)]
        if spills:
            first = message.HEADER_BYTES
            pieces = [(0, first, self._link.tag), (first, num_bytes, self._link.spill_tag)]
        lane = self._link.lanes[self._num_sent % len(self._link.lanes)]
        self._num_sent += 1
        with peers():
            works = [
                dist.isend(buffer.data[start:stop], self._link.peer, group=lane, tag=tag) for start, stop, tag in pieces
            ]
        self._leaving.append((buffer, works))
        if self._direct is not None:
            self._direct.send([tensor.to(self._link.device) for tensor in tensors])  # NCCL takes only those of GPUs
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
        return _Buffer(self._link.buffer(max(num_bytes, self._capacity.num_bytes)))


class Receiver(ReceivingEnd):
    """The receiving end; arguments as for `ChannelSender`."""

    def __init__(self, link: ChannelLink, first_bytes: int) -> None:
        self._link = link
        self._capacity = _Capacity(first_bytes, 0)
        self._layouts: list[message.MessageLayout] = []
        self._posted: deque[tuple[Any, torch.Tensor, Any]] = deque()  # operation, buffer and lane
        self._num_posted = 0
        self._num_unposted = 0  # expected messages without a buffer yet
        self.num_taken = 0

    def expect(self, num_messages: int) -> None:
        """Post buffers for future messages, now and as others are received."""
        self._num_unposted += num_messages
        while self._num_unposted > 0 and len(self._posted) < AHEAD:
            self._post()

    def receive(self, unit: int | None) -> Received:
        """Wait for the next message; see `ReceivingEnd`."""
        if not self._posted:  # the caller hasn't announced it by `expect`
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
        """Receive the tensors by NCCL. The GPU waits for them; the host waits only for those that it gets itself.

        NCCL receives after the current stream's earlier work. The idle stream has none, so bytes arrive while the GPU
        computes. The GPU's later work waits for them, and so does reuse of the idle stream's memory.
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
        buffer = self._link.buffer(self._capacity.num_bytes)
        lane = self._link.lanes[self._num_posted % len(self._link.lanes)]
        self._num_posted += 1
        with peers():
            work = dist.irecv(buffer, self._link.peer, group=lane, tag=self._link.tag)
        self._posted.append((work, buffer, lane))
        self._num_unposted -= 1
