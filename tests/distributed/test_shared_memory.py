"""Values in memory that two processes share; both ends are here, and no process is needed."""

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipebench.distributed import pipes
from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.pipes import PipePair, _opened
from pipebench.distributed.shared_memory import SharedReceiver, SharedSender

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")


class Ends:
    """A sender and its receiver, with pipes between them."""

    def __init__(self, limit_s: float = 60.0) -> None:
        records, tokens = os.pipe(), os.pipe()
        own = os.getpid()
        self.sender = SharedSender(PipePair(own, tokens[0], records[1], limit_s), lambda: 1.5)
        self.receiver = SharedReceiver(PipePair(own, records[0], tokens[1], limit_s), lambda: 2.5)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.close()


def values_of(unit: int, size: int) -> Any:
    return {
        4: torch.arange(size, dtype=torch.int64) + 1000 * unit,
        7: [(torch.full((size, 2), unit / 2), "text", None)],
    }


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.data())
def test_values_of_any_size_arrive_and_stay_while_they_are_held(sizes: list[int], data: st.DataObject) -> None:
    """Nothing is overwritten, however far the sender runs ahead and whatever the receiver still holds."""
    ends, held, sent = Ends(), dict[int, Any](), 0
    for unit, size in enumerate(sizes):
        while sent <= unit or (sent < len(sizes) and data.draw(st.booleans())):
            assert ends.sender.send(sent, values_of(sent, sizes[sent]), 0.25) == 16 * sizes[sent]
            sent += 1
        message = ends.receiver.receive(unit)
        assert (message.sent_s, message.arrived_s, message.note) == (1.5, 2.5, 0.25)
        assert message.payload_bytes == 16 * size
        held[unit] = message.values
        del message
        for known in list(held):
            expected = values_of(known, sizes[known])
            assert torch.equal(held[known][4], expected[4])
            assert torch.equal(held[known][7][0][0], expected[7][0][0])
            assert held[known][7][0][1:] == ("text", None)
            if data.draw(st.booleans()):
                del held[known]
    assert ends.receiver.num_taken == len(sizes)
    held.clear()
    ends.close()


def test_a_slot_is_reused_when_all_tensors_of_its_message_are_freed(ends: Ends) -> None:
    held = []
    for unit in range(3):
        ends.sender.send(unit, (torch.full((2,), float(unit)), torch.zeros(3)), 0.0)
        held.append(ends.receiver.receive(unit).values[0])  # the other tensor is let go
    assert len(ends.sender._slots) == 3
    del held[1]
    for unit in range(3, 30):
        ends.sender.send(unit, torch.full((2,), float(unit)), 0.0)
        assert ends.receiver.receive(unit).values.tolist() == [unit, unit]
    assert len(ends.sender._slots) == 3
    assert [each.tolist() for each in held] == [[0.0, 0.0], [2.0, 2.0]]


def test_values_of_any_layout_are_sent(ends: Ends) -> None:
    """Transposed, sliced, of one number with any stride, which torch calls contiguous, and empty."""
    grid = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    values = (grid.t(), grid[1:3, ::2], grid[:1, 5], grid[2, 3], grid[:0], torch.ones(1).expand(3, 2))
    assert values[2].is_contiguous()
    assert values[2].reshape(-1).stride() == (6,)
    ends.sender.send(0, values, 0.0)
    for sent, received in zip(values, ends.receiver.receive(0).values, strict=True):
        assert torch.equal(sent, received)


def test_many_values_in_flight_take_no_more_file_descriptors(ends: Ends) -> None:
    """A flush of a thousand microbatches has as many, and most systems let a process have 1,024 files open."""
    before = len(os.listdir("/proc/self/fd"))
    for unit in range(50):
        ends.sender.send(unit, torch.full((3,), float(unit)), 0.0)
    assert len(os.listdir("/proc/self/fd")) <= before
    held = [ends.receiver.receive(unit).values for unit in range(50)]
    assert [value.tolist() for value in held] == [[unit] * 3 for unit in range(50)]


def test_saved_tensors_keep_their_slot(ends: Ends) -> None:
    """Only the graph holds the leaf, and its gradient is right although other messages came."""
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    ends.sender.send(0, torch.tensor([5.0, 7.0]).requires_grad_(), 0.0)
    result = (ends.receiver.receive(0).values * weight).sum()
    for unit in range(1, 4):
        ends.sender.send(unit, torch.zeros(2), 0.0)
        ends.receiver.receive(unit)
    result.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0, 7.0]
    del result
    gc.collect()
    ends.sender.send(4, torch.zeros(2), 0.0)
    assert len(ends.sender._slots) == 2
    assert len(ends.sender._free) == 1


def test_a_received_value_is_a_leaf_with_a_storage_of_its_own(ends: Ends) -> None:
    ends.sender.send(0, (torch.ones(5).requires_grad_(), torch.ones(7, dtype=torch.float64)), 0.0)
    first, second = ends.receiver.receive(0).values
    assert (first.is_leaf, first.requires_grad, second.requires_grad) == (True, True, False)
    assert (first.untyped_storage().nbytes(), second.untyped_storage().nbytes()) == (20, 56)
    version = first._version
    second.add_(1.0)
    assert first._version == version


def test_a_value_may_change_once_it_is_sent(ends: Ends) -> None:
    tensor = torch.ones(4, 3).t()  # neither contiguous
    ends.sender.send(0, tensor, 0.0)
    tensor.zero_()
    assert torch.equal(ends.receiver.receive(0).values, torch.ones(3, 4))


def test_a_bounded_sender_waits_until_its_oldest_message_is_taken(ends: Ends) -> None:
    """Taken, not let go: a receiver may hold more values than may be on their way."""
    sent: list[int] = []

    def send() -> None:
        for unit in range(6):
            ends.sender.send(unit, torch.zeros(8), 0.0, most_leaving=2)
            sent.append(unit)

    thread = threading.Thread(target=send)
    thread.start()
    held = []
    for unit in range(6):
        held.append(ends.receiver.receive(unit).values)
        assert len(sent) <= unit + 4
    thread.join()
    assert len(ends.sender._slots) == 6


def test_a_unit_out_of_order_is_reported_with_its_number(ends: Ends) -> None:
    ends.sender.send(3, torch.ones(1), 0.0)
    with pytest.raises(AssertionError, match="sent unit 3 where unit 2 was awaited"):
        ends.receiver.receive(2)


def test_a_lost_peer_is_reported() -> None:
    """Waits for it raise an error; freeing a value afterwards doesn't."""
    ends = Ends()
    ends.sender.send(0, torch.ones(1), 0.0)
    value = ends.receiver.receive(0).values
    ends.sender.close()
    with pytest.raises(PeerLostError, match="lost a peer: the process at the other end of a pipe is gone"):
        ends.receiver.receive(1)
    del value
    ends.receiver.close()
    ends = Ends()
    ends.receiver.close()
    with pytest.raises(PeerLostError, match="lost a peer: the process at the other end of a pipe is gone"):
        ends.sender.send(0, torch.ones(1), 0.0)
    ends.sender.close()


def test_a_silent_peer_counts_as_lost_after_the_limit() -> None:
    ends = Ends(limit_s=0.01)
    with pytest.raises(PeerLostError, match=r"lost a peer: nothing came within 0\.01 s"):
        ends.receiver.receive(0)
    ends.close()


def test_a_slot_of_an_ended_process_is_a_lost_peer(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.sender.send(0, torch.ones(1), 0.0)

    def gone(process: int, file: int, mode: int) -> int:
        return _opened(1 << 30, file, mode)

    monkeypatch.setattr(pipes, "_opened", gone)
    with pytest.raises(PeerLostError, match=r"lost a peer: process .* is gone"):
        ends.receiver.receive(0)


def test_a_forked_process_frees_no_slot(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that a loader's process inherits and frees are still held by its parent."""
    ends.sender.send(0, torch.ones(1), 0.0)
    value = ends.receiver.receive(0).values
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    del value
    monkeypatch.undo()
    ends.sender.send(1, torch.zeros(1), 0.0)
    assert len(ends.sender._slots) == 2
