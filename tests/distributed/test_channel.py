"""Both ends of a channel agree on buffers without messages about them, for all sizes; no process is needed."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence

from pipebench.distributed import channel as channel_module
from pipebench.distributed.channel import AHEAD, ChannelLink, ChannelSender, DirectSends, Receiver
from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.message import HEADER_BYTES, layout_key_of, read_header
from pipebench.model.values import detached
from tests.made_up_gpu import made_up_gpu
from tests.patience import PATIENCE_S


class Work:
    """A send or a receive of a `Wire`."""

    def __init__(self, data: torch.Tensor, wait: Callable[["Work"], None]) -> None:
        self.data = data
        self.done = Event()
        self.broken = False
        self._wait = wait

    def wait(self) -> None:
        self._wait(self)


class Wire:
    """Stands in for `torch.distributed` with both ends here; bytes are read as late as they may be, when they leave."""

    def __init__(self) -> None:
        self.sends: dict[int, deque[Work]] = defaultdict(deque)
        self.receives: dict[int, deque[Work]] = defaultdict(deque)
        self.headers: list[Any] = []
        self.num_waits = 0

    def isend(self, data: torch.Tensor, peer: int, group: Any, tag: int) -> Work:
        work = Work(data, self._wait_until_left)
        self.sends[tag].append(work)
        return work

    def irecv(self, data: torch.Tensor, peer: int, group: Any, tag: int) -> Work:
        work = Work(data, self._arrive)
        self.receives[tag].append(work)
        return work

    def recv(self, data: torch.Tensor, peer: int, group: Any, tag: int) -> None:
        self.irecv(data, peer, group, tag).wait()

    def move(self) -> None:
        """Let everything travel for which a buffer is posted."""
        for tag, sends in self.sends.items():
            while sends and self.receives[tag]:
                send, receive = sends.popleft(), self.receives[tag].popleft()
                assert len(send.data) <= len(receive.data), "a message is larger than the buffer posted for it"
                receive.data[: len(send.data)] = send.data
                if len(send.data) >= HEADER_BYTES and tag == _TAG:
                    self.headers.append(read_header(send.data))
                send.data.fill_(0xEE)
                receive.done.set()
                send.done.set()

    def cut(self) -> None:
        for send in self.sends[_TAG]:
            send.broken = True
            send.done.set()

    def _arrive(self, work: Work) -> None:
        self.move()
        self.num_waits += 1
        assert work.done.is_set(), "nothing was sent"

    def _wait_until_left(self, work: Work) -> None:
        assert work.done.wait(PATIENCE_S)
        if work.broken:
            raise RuntimeError("gloo: Connection closed by peer")


_TAG = 2


class Ends:
    """A sender and its receiver."""

    def __init__(self, wire: Wire, first_bytes: int) -> None:
        self.wire = wire
        self.num_buffers = 0
        link = ChannelLink(0, [None], _TAG, None, torch.device("cpu"), lambda: 0.0)
        buffer = link.buffer

        def counted(num_bytes: int) -> torch.Tensor:
            self.num_buffers += 1
            return buffer(num_bytes)

        sending = ChannelLink(0, [None], _TAG, None, torch.device("cpu"), lambda: 0.0)
        object.__setattr__(sending, "buffer", counted)
        self.sender, self.receiver = ChannelSender(sending, first_bytes), Receiver(link, first_bytes)

    def all_left(self) -> bool:
        return not self.wire.sends[_TAG]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    found = Wire()
    monkeypatch.setattr(channel_module, "dist", found)
    return found


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def values_of(unit: int, size: int) -> Any:
    return {4: torch.arange(size, dtype=torch.int64) + 1000 * unit}


@settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(0, 1200), min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(0, 3000),
    st.data(),
)
def test_both_ends_agree_on_sizes_in_any_order_of_events(
    segments: list[list[int]], first_bytes: int, data: st.DataObject
) -> None:
    """Sends run ahead, bytes travel at any moment, sizes grow and shrink; segments end drained."""
    with pytest.MonkeyPatch.context() as patch:
        wire = Wire()
        patch.setattr(channel_module, "dist", wire)
        ends, unit = Ends(wire, first_bytes), 0
        largest, sizes = 0, [size for segment in segments for size in segment]
        for segment in segments:
            ends.receiver.expect(len(segment))
            sent = received = 0
            while received < len(segment):
                if sent < len(segment) and (sent == received or data.draw(st.booleans())):
                    ends.sender.send(unit + sent, values_of(unit + sent, segment[sent]), 0.5)
                    sent += 1
                else:
                    message = ends.receiver.receive(unit + received)
                    expected = values_of(unit + received, segment[received])
                    assert torch.equal(message.values[4], expected[4])
                    assert message.payload_bytes == 8 * segment[received]
                    received += 1
                if data.draw(st.booleans()):
                    wire.move()
            unit += len(segment)
            ends.sender.flush()
        assert [header.unit for header in wire.headers] == list(range(len(sizes)))
        assert [header.text_bytes > 0 for header in wire.headers] == [
            size not in sizes[:i] for i, size in enumerate(sizes)
        ], "a layout travels once"
        for index, header in enumerate(wire.headers):
            largest = max([0, *(h.num_bytes for h in wire.headers[: max(0, index - AHEAD + 1)])])
            assert not (header.spilled and header.num_bytes <= largest), "a size that was there before fits"


def test_repeated_shapes_take_one_message_and_no_layout_text(wire: Wire) -> None:
    ends = Ends(wire, 0)
    sizes = [2000, 100] * 10
    ends.receiver.expect(len(sizes))
    for unit, size in enumerate(sizes):
        ends.sender.send(unit, values_of(unit, size), 0.0)
        ends.receiver.receive(unit)
    assert [h.spilled for h in wire.headers] == [1] + [0] * 19
    assert [h.text_bytes > 0 for h in wire.headers] == [True, True] + [False] * 18
    assert wire.num_waits == 20 + 1  # one each, and one for what spilled


def test_numbers_that_are_equal_but_not_the_same_keep_their_types(wire: Wire) -> None:
    ends = Ends(wire, 0)
    given = [(1,), (True,), (1.0,), (1,)]
    ends.receiver.expect(len(given))
    for unit, values in enumerate(given):
        ends.sender.send(unit, values, 0.0)
    found = [ends.receiver.receive(unit).values for unit in range(len(given))]
    assert [type(value) for (value,) in found] == [int, bool, float, int]


def test_receives_are_posted_before_anything_is_sent(wire: Wire) -> None:
    ends = Ends(wire, 0)
    ends.receiver.expect(5)
    assert len(wire.receives[_TAG]) == AHEAD
    ends.sender.send(0, values_of(0, 3), 0.0)
    wire.move()
    assert ends.all_left()  # although nobody has asked for it yet
    ends.receiver.receive(0)
    assert len(wire.receives[_TAG]) == AHEAD


def test_no_receive_is_posted_beyond_the_last_message(wire: Wire) -> None:
    ends = Ends(wire, 0)
    ends.receiver.expect(1)
    assert len(wire.receives[_TAG]) == 1


def test_buffers_are_used_again_once_their_message_has_left(wire: Wire) -> None:
    """Gloo's sends never complete by themselves: without a notice, a segment would keep all buffers it ever sent."""
    ends = Ends(wire, 64)
    ends.receiver.expect(30)
    for unit in range(30):
        ends.sender.send(unit, values_of(unit, 8), 0.0)
        ends.receiver.receive(unit)
        if unit % 3 == 0:
            ends.sender.taken(ends.receiver.num_taken)  # as a message the other way tells
    assert ends.num_buffers == 3


def test_a_buffer_is_not_reused_before_its_message_has_left(wire: Wire) -> None:
    ends = Ends(wire, 64)
    ends.receiver.expect(6)
    for unit in range(6):
        ends.sender.send(unit, values_of(unit, 8), 0.0)
    assert ends.num_buffers == 6
    assert [int(ends.receiver.receive(unit).values[4][0]) for unit in range(6)] == [1000 * unit for unit in range(6)]


def test_values_may_change_once_they_are_sent_and_received(wire: Wire) -> None:
    ends = Ends(wire, 64)
    ends.receiver.expect(3)
    tensor = torch.ones(4)
    ends.sender.send(0, tensor, 0.0)
    tensor.zero_()
    first = ends.receiver.receive(0).values
    ends.sender.send(1, tensor, 0.0)
    second = ends.receiver.receive(1).values
    assert torch.equal(first, torch.ones(4))
    assert not second.any()
    second.add_(5)
    ends.sender.send(2, tensor, 0.0)
    assert not ends.receiver.receive(2).values.any()


def test_a_received_value_is_a_fresh_leaf_each_time(wire: Wire) -> None:
    """A buffer that is the leaf itself gathers hooks and gradients."""
    ends = Ends(wire, 64)
    ends.receiver.expect(2)
    found = []
    for unit in range(2):
        ends.sender.send(unit, torch.ones(4).requires_grad_(), 0.0)
        found.append(ends.receiver.receive(unit).values)
        found[-1].sum().backward()
    assert found[0].data_ptr() != found[1].data_ptr()
    assert all(each.is_leaf and torch.equal(each.grad, torch.ones(4)) for each in found)


def test_a_bounded_sender_waits_for_its_oldest_message(wire: Wire) -> None:
    """What an evaluation may have on its way to a slow stage: so many messages, and those that it has buffers for."""
    ends = Ends(wire, 64)
    ends.receiver.expect(9)
    sent: list[int] = []

    def send() -> None:
        for unit in range(9):
            ends.sender.send(unit, values_of(unit, 8), 0.0, most_leaving=3)
            sent.append(unit)

    thread = threading.Thread(target=send)
    thread.start()
    until(lambda: len(sent) == 3)
    wire.move()
    for received in range(4):
        until(lambda: len(sent) == 3 + AHEAD + received)  # noqa: B023
        assert len(wire.sends[_TAG]) == 3
        ends.receiver.receive(received)
        wire.move()
    until(lambda: len(sent) == 9)
    thread.join()
    assert ends.num_buffers <= 4


def test_a_unit_out_of_order_is_reported_with_its_number(wire: Wire) -> None:
    ends = Ends(wire, 64)
    ends.receiver.expect(1)
    ends.sender.send(3, torch.ones(1), 0.0)
    with pytest.raises(AssertionError, match=r"rank 0 sent unit 3 \(tag 2\) where unit 2 was awaited"):
        ends.receiver.receive(2)


def test_a_lost_receiver_is_reported_to_the_sender(wire: Wire) -> None:
    ends = Ends(wire, 64)
    ends.sender.send(0, torch.ones(1), 0.0)
    wire.cut()
    with pytest.raises(PeerLostError, match="Connection closed by peer"):
        ends.sender.flush()


class Device:
    """An emulated GPU: streams, each of which ends its work at some second, and NCCL, whose receives take 2 s."""

    def __init__(self) -> None:
        self.ends_s = {"computing": 10.0, "idle": 0.0}
        self.current = "computing"
        self.used_on: list[str] = []  # by every tensor

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def irecv(self, data: torch.Tensor, peer: int, group: Any) -> "Device._Work":
        """Begin when the stream that is current has done what it was given."""
        return self._Work(self, self.ends_s[self.current] + 2.0)

    class _Work:
        def __init__(self, device: "Device", end_s: float) -> None:
            self._device, self._end_s = device, end_s

        def wait(self) -> None:
            """Let the stream that is current wait, not the host."""
            ends_s, current = self._device.ends_s, self._device.current
            ends_s[current] = max(ends_s[current], self._end_s)


def test_tensors_are_received_while_the_gpu_computes(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.0: receives were posted on the computing stream, behind all work queued there."""
    gpu = Device()
    link = ChannelLink(0, [None], _TAG, "pair", torch.device("cpu"), lambda: 0.0, idle="idle")
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: gpu.used_on.append(stream))
    layout = layout_key_of({4: (torch.zeros(3), torch.zeros(2, 2))})[0].layout()
    monkeypatch.setattr(channel_module, "dist", gpu)
    received = Receiver(link, 0)._directly(layout)
    assert [tuple(tensor.shape) for tensor in received] == [(3,), (2, 2)]
    assert gpu.ends_s == {"computing": 10.0, "idle": 0.0}  # there since 2 s; what computes next waits for nothing
    assert gpu.used_on == ["computing", "computing"]  # the allocator has to know: the memory is the idle stream's


def test_optimizer_states_on_the_host_are_sent_from_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of torch's count their steps there, and a group of NCCL takes a GPU's tensors only."""
    sent: list[str] = []

    class Network:
        @staticmethod
        def isend(data: torch.Tensor, peer: int, group: Any, tag: int = 0) -> Work:
            if group == "pair":
                sent.append(data.device.type)
            return Work(data, lambda work: None)

    monkeypatch.setattr(channel_module, "dist", Network)
    there = torch.device("meta")  # for a GPU
    sender = ChannelSender(ChannelLink(0, [None], _TAG, "pair", there, lambda: 0.0), 0)
    sender.send(0, {"exp_avg": torch.zeros(3, device=there), "step": torch.tensor(2.0)}, 0.0)
    assert sent == ["meta", "meta"]


OF_NCCL = {  # in torch's table
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([300, -5], dtype=torch.int16),
        torch.tensor([1 + 2j, -3j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor([3 - 4j]),
        torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last).bfloat16(),
        torch.arange(12).view(3, 4).T,
        torch.arange(9)[::4][1:2],
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
    ],
)
def test_tensors_of_types_that_nccl_lacks_are_sent(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.2.0 in its beginnings: int16 and lazy conjugates ended a run on GPUs, and a lazy negative lost its sign."""
    sent: deque[torch.Tensor] = deque()

    class Pair:
        @staticmethod
        def isend(data: torch.Tensor, peer: int, group: Any) -> Work:
            data = torch.view_as_real(data) if data.is_complex() else data  # as torch's, which raises for lazy ones
            assert data.dtype in OF_NCCL
            assert data.is_contiguous()
            assert not data.is_neg()
            sent.append(data)
            return Work(data, lambda work: None)

        @staticmethod
        def irecv(data: torch.Tensor, peer: int, group: Any) -> Work:
            data = torch.view_as_real(data) if data.is_complex() else data
            assert (data.dtype, data.nbytes) == (sent[0].dtype, sent[0].nbytes)
            data.view(-1).copy_(sent.popleft().reshape(-1))
            return Work(data, lambda work: None)

    monkeypatch.setattr(channel_module, "dist", Pair)
    DirectSends("pair", 0, None).send([tensor])
    link = ChannelLink(0, [None], _TAG, "pair", torch.device("cpu"), lambda: 0.0)
    (arrived,) = Receiver(link, 0)._directly(layout_key_of(tensor)[0].layout())
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived, tensor)


def packed_on_gpu() -> PackedSequence:
    """Return a packed sequence as torch wants it: the numbers on the GPU, the lengths on the host."""
    return PackedSequence(torch.arange(5.0, device="cuda"), torch.tensor([3, 2]))


def assert_torch_takes(arrived: Any) -> None:
    taken = detached(arrived)  # the engine's first step; it calls torch's constructor, which looks at devices
    assert [taken.data.device.type, taken.batch_sizes.device.type] == ["cuda", "cpu"]
    assert torch.equal(taken.data.cpu(), torch.arange(5.0))
    assert taken.batch_sizes.tolist() == [3, 2]


def test_tensors_on_the_sender_s_host_arrive_on_the_receiver_s_host(wire: Wire) -> None:
    """0.1.0: a packed sequence's lengths arrived on the GPU, where torch refuses them."""
    with made_up_gpu():
        link = ChannelLink(0, [None], _TAG, None, torch.device("cuda"), lambda: 0.0)
        sender, receiver = ChannelSender(link, 0), Receiver(link, 0)
        receiver.expect(1)
        sender.send(0, {0: packed_on_gpu()}, 0.0)
        wire.move()
        assert_torch_takes(receiver.receive(0).values[0])


def test_tensors_on_the_sender_s_host_arrive_on_the_receiver_s_host_by_nccl_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: deque[torch.Tensor] = deque()

    class Pair:
        @staticmethod
        def isend(data: torch.Tensor, peer: int, group: Any) -> Work:
            assert data.is_cuda
            sent.append(data)
            return Work(data, lambda work: None)

        @staticmethod
        def irecv(data: torch.Tensor, peer: int, group: Any) -> Work:
            assert data.is_cuda
            data.copy_(sent.popleft())
            return Work(data, lambda work: None)

    monkeypatch.setattr(channel_module, "dist", Pair)
    with made_up_gpu():
        key, tensors = layout_key_of(packed_on_gpu())
        layout = key.layout()
        link = ChannelLink(0, [None], _TAG, "pair", torch.device("cuda"), lambda: 0.0)
        DirectSends("pair", 0, None).send([tensor.to(link.device) for tensor in tensors])
        assert_torch_takes(layout.values(Receiver(link, 0)._directly(layout)))


def test_headers_alone_need_no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: asked.append(pin_memory))
    for direct in (None, "pair"):
        ChannelLink(0, [None], _TAG, direct, torch.device("cuda"), lambda: 0.0).buffer(8)
    assert asked == [True, False]
