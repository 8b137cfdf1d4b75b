"""Layers that move give way to a pipeline's messages; both ends are here, threads and all, and no process is needed."""

import itertools
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipebench.distributed import yielding
from pipebench.distributed.channel import ChannelLink
from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.message import HEADER_BYTES
from pipebench.distributed.sockets import open_sockets, opened_since
from pipebench.distributed.yielding import PIECE_BYTES, PIECES_AHEAD, YieldingReceiver, YieldingSender, until_gone
from tests.patience import PATIENCE_S


class Work:
    """A send or a receive; done when both are there."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.done = data, threading.Event()
        self.failure: Exception | None = None

    def wait(self) -> None:
        assert self.done.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure


class Wire:
    """Stands in for `torch.distributed`: as Gloo, it carries a message when its receive is posted."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[bool, list[Work]] = {True: [], False: []}
        self.sizes: list[int] = []  # of what set out
        self.most_posted = 0

    def isend(self, data: torch.Tensor, peer: int, group: Any, tag: int) -> Work:
        self.sizes.append(len(data))
        return self._met(data, is_send=True)

    def irecv(self, data: torch.Tensor, peer: int, group: Any, tag: int) -> Work:
        return self._met(data, is_send=False)

    def cut(self) -> None:
        with self.lock:
            for work in (*self.waiting[True], *self.waiting[False]):
                work.failure = RuntimeError("gloo: Connection closed by peer")
                work.done.set()

    def _met(self, data: torch.Tensor, *, is_send: bool) -> Work:
        work = Work(data)
        with self.lock:
            self.waiting[is_send].append(work)
            self.most_posted = max(self.most_posted, len(self.waiting[False]))
            while self.waiting[True] and self.waiting[False]:
                sent, received = self.waiting[True].pop(0), self.waiting[False].pop(0)
                assert len(sent.data) == len(received.data)
                received.data.copy_(sent.data)
                sent.done.set()
                received.done.set()
        return work


class Ends:
    """A sender and its receiver."""

    def __init__(self, give_way: Callable[[], None] = lambda: None, limit_s: float = PATIENCE_S) -> None:
        link = ChannelLink(1, [None], 2, None, torch.device("cpu"), lambda: 1.5)
        self.sender, self.receiver = YieldingSender(link, give_way), YieldingReceiver(link, limit_s)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    found = Wire()
    monkeypatch.setattr(yielding, "dist", found)
    return found


def values_of(unit: int, size: int) -> Any:
    return {"a": torch.arange(size, dtype=torch.int64) + 1000 * unit, "b": [unit, torch.full((3,), 0.5)]}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3 * PIECE_BYTES // 8), min_size=1, max_size=6), st.data())
def test_values_of_any_size_arrive_in_order(sizes: list[int], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        wire = Wire()
        patch.setattr(yielding, "dist", wire)
        ends = Ends()
        try:
            _exchange(ends, sizes, data)
        finally:  # an example that hypothesis gives up, too
            ends.close()
    assert ends.receiver.num_taken == len(sizes)
    assert max(wire.sizes) <= PIECE_BYTES
    assert wire.most_posted <= PIECES_AHEAD


def _exchange(ends: Ends, sizes: list[int], data: st.DataObject) -> None:
    sent = 0
    for unit, size in enumerate(sizes):
        while sent <= unit or (sent < len(sizes) and data.draw(st.booleans())):
            values = values_of(sent, sizes[sent])
            assert ends.sender.send(sent, values, 0.25) == 8 * sizes[sent] + 12
            values["a"].fill_(-1)  # what was handed over is its own
            sent += 1
        message = ends.receiver.receive(data.draw(st.sampled_from([unit, None])))
        assert torch.equal(message.values["a"], values_of(unit, size)["a"])
        assert message.values["b"][0] == unit
        assert (message.unit, message.sent_s, message.arrived_s, message.note) == (unit, 1.5, 1.5, 0.25)
    ends.sender.flush()


def test_nothing_sets_out_while_something_is_queued(wire: Wire) -> None:
    """The pipeline has something to send after every piece: each waits until that is gone."""
    asked, free = queue.SimpleQueue[int](), queue.SimpleQueue[None]()

    def give_way() -> None:
        asked.put(sum(wire.sizes))
        free.get(timeout=PATIENCE_S)

    ends = Ends(give_way)
    ends.sender.send(0, values_of(0, PIECE_BYTES // 2), 0.0)  # four pieces and a little, after the header
    out = []
    for _ in range(6):
        out.append(asked.get(timeout=PATIENCE_S))
        free.put(None)
    ends.receiver.receive(0)
    assert out[:2] == [0, HEADER_BYTES]
    assert all(b - a <= PIECE_BYTES for a, b in itertools.pairwise(out))
    free.put(None)
    ends.close()


def test_a_worker_is_told_when_the_other_is_gone(wire: Wire) -> None:
    late = Ends(limit_s=0.01)
    with pytest.raises(PeerLostError, match="no layers came within"):
        late.receiver.receive(0)
    late.close()
    ends = Ends()
    assert _soon(lambda: wire.waiting[False])
    wire.cut()
    for _ in range(2):
        with pytest.raises(PeerLostError, match="Connection closed by peer"):
            ends.receiver.receive(0)
    wire.waiting[False].clear()
    ends.sender.send(0, values_of(0, 5), 0.0)
    assert _soon(lambda: wire.waiting[True])
    wire.cut()
    with pytest.raises(PeerLostError, match="Connection closed by peer"):
        ends.sender.flush()
    with pytest.raises(PeerLostError, match="Connection closed by peer"):
        ends.sender.send(1, values_of(1, 5), 0.0)


def test_what_a_connection_has_still_to_send_is_seen() -> None:
    """Of the connections that are asked about, and of nobody else's."""
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        mine = opened_since(before)
        near.setblocking(False)
        assert mine.queued_bytes() == 0
        sent = 0
        while sent < 1 << 26:  # until nobody takes any more
            try:
                sent += near.send(bytes(1 << 16))
            except BlockingIOError:
                break
        assert mine.queued_bytes() > 1 << 16
        assert before.queued_bytes() == 0
        reader = threading.Thread(target=_read, args=(far, sent))
        reader.start()
        until_gone(mine.queued_bytes)
        reader.join()
    assert mine.queued_bytes() == 0, "it is closed"


def _read(far: socket.socket, num_bytes: int) -> None:
    with far:
        while num_bytes:
            num_bytes -= len(far.recv(1 << 20))


def _soon(true: Callable[[], object]) -> bool:
    waiting = threading.Event()
    for _ in range(int(1000 * PATIENCE_S)):
        if true():
            return True
        waiting.wait(0.001)
    return False
