"""Channels that yield: layers that move between hosts let a pipeline's messages go first.

A block of layers is large and not urgent. It has its own connection and goes piece by piece, sent and received by
threads while the workers compute. Before every piece the sender checks whether the kernel still has bytes to send on
the pipeline's connections of this worker, as all share one wire; if so, the block waits. Few pieces are in transfer, so
an activation never queues behind more than those.

Neither waits forever: sockets drain whatever the workers do, and a worker that waits for its block soon has nothing
more to send, nor a worker that sends to it.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.channel import ChannelLink
from pipebench.distributed.ends import Received, ReceivingEnd, SendingEnd
from pipebench.distributed.launch_join import PeerLostError, peers
from pipebench.distributed.message import (
    HEADER_BYTES,
    Header,
    Layouts,
    MessageLayout,
    layout_in,
    layout_key_of,
    pack,
    read_header,
    write_header,
)

PIECE_BYTES = 1 << 17
PIECES_AHEAD = 2  # in transfer at once: one is written while the other is read
_SOON_GONE_BYTES = 1 << 14  # the end of a message, which the other end may confirm late
_LOOK_AGAIN_S = 0.001
_END = -1  # in place of a unit: no more messages


def until_gone(queued_bytes: Callable[[], int]) -> None:
    """Wait until almost nothing is queued."""
    while queued_bytes() > _SOON_GONE_BYTES:
        time.sleep(_LOOK_AGAIN_S)


class YieldingSender(SendingEnd):
    """The sending end; its thread runs until it is closed. `give_way` waits until the next piece may be sent."""

    def __init__(self, link: ChannelLink, give_way: Callable[[], None]) -> None:
        self._link = link
        self._give_way = give_way
        self._layouts = Layouts()
        self._changed = threading.Condition()
        self._outbox: deque[torch.Tensor] = deque()  # the first is in transfer
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = _started(self._run, f"pipebench-moves-to-{link.peer}")

    def send(self, unit: int, values: Any, note: float, most_leaving: int | None = None, taken: int = 0) -> int:
        """Send a message; see `SendingEnd`."""
        key, tensors = layout_key_of(values)
        number, layout, text = self._layouts.of(key)
        num_bytes = HEADER_BYTES + len(text) + layout.num_bytes
        data = self._link.buffer(num_bytes)
        pack(data, text, layout.views(data.numpy(), HEADER_BYTES + len(text)), tensors)
        write_header(data, Header(unit, number, len(text), num_bytes, 0, self._link.clock(), note, taken))
        with self._changed:
            while most_leaving is not None and len(self._outbox) >= most_leaving:
                self._wait()
            self._put(data)
        return layout.payload_bytes

    def flush(self) -> None:
        """Wait until every message has left."""
        with self._changed:
            while self._outbox:
                self._wait()

    def close(self) -> None:
        """Send the receiver the end mark, and end."""
        data = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        write_header(data, Header(_END, 0, 0, HEADER_BYTES, 0, 0.0, 0.0))
        with self._changed:
            self._put(data)
            self._closed = True
        self._thread.join()

    def _put(self, data: torch.Tensor) -> None:
        if self._failure is not None:
            raise self._failure
        self._outbox.append(data)
        self._changed.notify_all()

    def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._changed.wait()

    def _run(self) -> None:
        try:
            while (data := self._next()) is not None:
                _all_done(self._set_out(piece) for piece in _pieces(data))
                with self._changed:
                    self._outbox.popleft()
                    self._changed.notify_all()
        except Exception as error:  # raised by the next send
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next(self) -> torch.Tensor | None:
        with self._changed:
            while not self._outbox and not self._closed:
                self._changed.wait()
            return self._outbox[0] if self._outbox else None

    def _set_out(self, piece: torch.Tensor) -> Any:
        self._give_way()
        return dist.isend(piece, self._link.peer, group=self._link.lanes[0], tag=self._link.tag)


class YieldingReceiver(ReceivingEnd):
    """The receiving end; its thread runs until the sender is closed, which counts as lost after waits of `limit_s`."""

    def __init__(self, link: ChannelLink, limit_s: float) -> None:
        self.num_taken = 0
        self._link = link
        self._limit_s = limit_s
        self._layouts: list[MessageLayout] = []
        self._inbox: queue.SimpleQueue[tuple[torch.Tensor, float] | Exception] = queue.SimpleQueue()
        self._thread = _started(self._run, f"pipebench-moves-from-{link.peer}")

    def receive(self, unit: int | None) -> Received:
        """Wait for the next message; see `ReceivingEnd`."""
        try:
            found = self._inbox.get(timeout=self._limit_s)
        except queue.Empty:
            raise PeerLostError(f"lost a peer: no layers came within {self._limit_s:g} s") from None
        if isinstance(found, Exception):
            self._inbox.put(found)  # for the next call
            raise found
        data, arrived_s = found
        header = read_header(data)
        if unit is not None and header.unit != unit:
            raise AssertionError(f"rank {self._link.peer} sent unit {header.unit} where unit {unit} was awaited")
        layout, start = layout_in(data, header, self._layouts)
        tensors = [place.to(self._link.device) for place in layout.views(data.numpy(), start)]
        self.num_taken += 1
        values = layout.values(tensors)
        return Received(header.unit, values, layout.payload_bytes, header.sent_s, arrived_s, header.note, header.taken)

    def close(self) -> None:
        """Wait for the sender's end mark."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (data := self._next()) is not None:
                self._inbox.put((data, self._link.clock()))
        except Exception as error:  # raised by the next receive
            self._inbox.put(error)

    def _next(self) -> torch.Tensor | None:
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        _all_done([self._posted(head)])
        header = read_header(head)
        if header.unit == _END:
            return None
        data = self._link.buffer(header.num_bytes)
        first, *rest = _pieces(data)
        first.copy_(head)
        _all_done(self._posted(piece) for piece in rest)
        return data

    def _posted(self, piece: torch.Tensor) -> Any:
        return dist.irecv(piece, self._link.peer, group=self._link.lanes[0], tag=self._link.tag)


def _pieces(data: torch.Tensor) -> list[torch.Tensor]:
    """Return a message's pieces: the header alone, which has the length of the rest, then the rest."""
    head, body = data[:HEADER_BYTES], data[HEADER_BYTES:]
    return [head, *(body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))]


def _all_done(works: Iterable[Any]) -> None:
    """Wait for pieces, few of which are in transfer at once."""
    under_way: deque[Any] = deque()
    with peers():
        for work in works:
            under_way.append(work)
            if len(under_way) == PIECES_AHEAD:
                under_way.popleft().wait()
        while under_way:
            under_way.popleft().wait()


def _started(run: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
