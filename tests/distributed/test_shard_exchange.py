"""The memory of sharded replicas while they exchange, and the results; no process is needed."""

import itertools
import os
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pipebench.distributed import shard_exchange
from pipebench.distributed.instruction_times import HostTimer
from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.shard_exchange import Exchange, ShardReducer, WeightGather
from pipebench.engine.shards import Sharding, divided
from pipebench.engine.weights import Weights
from tests.distributed.shared_files import replicas, together

SIZES = [1200, 2000, 4, 6, 1]
SHAPES = [(1200,), (2, 1000), (4,), (2, 3), ()]
LARGE_BYTES = 1024


@pytest.fixture(autouse=True)
def few_bytes_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_exchange, "_LARGE_BYTES", LARGE_BYTES)


class Operation(NamedTuple):
    """A message of a batch."""

    way: str
    tensor: torch.Tensor
    group: Any
    group_peer: int


class Wire:
    """Stands in for `torch.distributed`; `peer` makes the tensors of a peer, given its position and the place."""

    P2POp, isend, irecv = Operation, "send", "receive"

    def __init__(self, peer: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        self.peer = peer
        self.batches: list[list[Operation]] = []

    def batch_isend_irecv(self, operations: list[Operation]) -> list["Wire"]:
        self.batches.append(operations)
        for way, tensor, _, position in operations:
            if way == self.irecv:
                tensor.copy_(self.peer(position, tensor))
        return [self]

    def wait(self) -> None:
        """Nothing is asynchronous here."""


def sharding(replicas: int, own: int, *, keeps_all: bool = True) -> Sharding:
    buckets = [[1, 3, 4, 2], [0]]
    return Sharding(
        tuple(tuple(divided(bucket, SIZES, replicas, whole=False)) for bucket in buckets), own, keeps_all=keeps_all
    )


def timer() -> HostTimer:
    clock = itertools.count()
    return HostTimer(0, lambda: float(next(clock)), print)


def reducer_of(monkeypatch: pytest.MonkeyPatch, replicas: int, own: int) -> tuple[ShardReducer, Wire]:
    wire = Wire(lambda position, place: torch.full_like(place, 10.0 ** (position + 1)))
    monkeypatch.setattr(shard_exchange, "dist", wire)
    exchange = Exchange(None, range(replicas), own)
    like = [torch.zeros(shape) for shape in SHAPES]
    return ShardReducer(sharding(replicas, own), like, exchange, timer()), wire


@pytest.mark.parametrize(("replicas", "own"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_member_takes_the_others_parts_alone_and_adds_its_own(
    monkeypatch: pytest.MonkeyPatch, replicas: int, own: int
) -> None:
    reducer, wire = reducer_of(monkeypatch, replicas, own)
    given = [torch.randn(shape) for shape in SHAPES]
    for index in (2, 3, 4, 1, 0):
        reducer.add(index, given[index])
    found = reducer.wait(lambda *_: None)
    pieces = sharding(replicas, own).own
    taken = sum(each.tensor.numel() for batch in wire.batches for each in batch if each.way == wire.irecv)
    assert taken == (replicas - 1) * sum(piece.stop - piece.start for piece in pieces)
    for piece, value in zip(pieces, found, strict=True):
        parts = [torch.full_like(piece.of(given[piece.place]), 10.0 ** (member + 1)) for member in range(replicas)]
        parts[own] = piece.of(given[piece.place])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        assert value is not None
        assert torch.equal(value, total)


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_large_gradients_are_sent_from_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    reducer, wire = reducer_of(monkeypatch, 2, 0)
    given = [torch.randn(shape) for shape in SHAPES]
    for index in (2, 3, 4, 1, 0):
        reducer.add(index, given[index])
    sent = [each.tensor for batch in wire.batches for each in batch if each.way == wire.isend]
    large = [each for each in sent if each.nbytes >= LARGE_BYTES]
    assert {storage_of(each) for each in large} == {storage_of(given[0]), storage_of(given[1])}
    assert sum(each.nbytes for each in sent) < 2 * sum(each.nbytes for each in large), "most of it isn't copied"


def test_a_lazy_conjugate_is_sent_as_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses to send one, which is the gradient of a complex weight that a model conjugates."""
    wire = Wire(lambda position, place: torch.full_like(place, 1j))
    monkeypatch.setattr(shard_exchange, "dist", wire)
    weight = torch.zeros(4, dtype=torch.complex64)
    halves = Sharding((tuple(divided([0], [4], 2, whole=True)),), 0)
    reducer = ShardReducer(halves, [weight], Exchange(None, range(2), 0), timer())
    reducer.add(0, torch.tensor([1j, 2, 3j, 4]).conj())
    (batch,) = wire.batches
    (sent,) = [torch.view_as_real(each.tensor) for each in batch if each.way == wire.isend]
    assert sent.tolist() == [[0, -1], [2, 0], [0, -3], [4, 0]]


def test_large_weights_arrive_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Module()
    for index, shape in enumerate(SHAPES):
        model.register_parameter(f"p{index}", nn.Parameter(torch.arange(float(SIZES[index])).view(shape)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    weights = Weights(
        model, lambda given: torch.optim.SGD(given, 0.1), divide=lambda _: sharding(2, 0, keeps_all=False)
    )
    theirs: list[torch.Tensor] = []
    wire = Wire(lambda position, place: theirs.pop(0))
    monkeypatch.setattr(shard_exchange, "dist", wire)
    exchange = Exchange(None, range(2), 0)
    for bucket in sharding(2, 1).buckets:
        _, messages = exchange.messages(bucket, before)
        theirs += [torch.cat([piece.of(before[piece.place]).reshape(-1) for piece in each]) for each in messages]
    gather = WeightGather(weights, exchange, timer())
    weights.allocate()
    gather.start()
    gather.wait()
    assert not theirs
    taken = [each.tensor for batch in wire.batches for each in batch if each.way == wire.irecv]
    own = {storage_of(flat) for flat in weights.newest.flats}
    assert [storage_of(each) in own for each in taken] == [each.nbytes >= LARGE_BYTES for each in taken]
    for found, value in zip(weights.newest.parameters, before, strict=True):
        assert torch.equal(found, value)
    weights.free()
    assert weights.gathered_bytes == 0


class Native(Wire):
    """A backend that scatters and gathers, as torch 2.15's NCCL, which reads the addresses of the first two parts."""

    def reduce_scatter(
        self, output: torch.Tensor, given: list[torch.Tensor], *, group: Any, async_op: bool
    ) -> "Native":
        assert async_op
        assert [each.numel() for each in given].count(output.numel()) > 0
        self.scattered = [each.clone() for each in given]
        output.fill_(7.0)
        return self

    def all_gather(self, found: list[torch.Tensor], given: torch.Tensor, *, group: Any, async_op: bool) -> "Native":
        assert async_op
        if found[0].data_ptr() == found[1].data_ptr():
            raise RuntimeError("shape '[6]' is invalid for input of size 0")
        self.gathered = [each.numel() for each in found]
        return self


def test_buckets_with_too_few_elements_for_all_members_are_not_exchanged_by_the_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bucket of few elements is one member's: the others' parts are empty, and empty tensors have no address."""
    model = nn.Module()
    for index, size in enumerate(SIZES):
        model.register_parameter(f"p{index}", nn.Parameter(torch.arange(float(size))))
    buckets = [tuple(divided(each, SIZES, 3, whole=False)) for each in ([0], [3])]
    found = Sharding(tuple(buckets), 2, keeps_all=False)
    assert [[len(part) for part in bucket] for bucket in found.buckets] == [[1, 1, 1], [0, 0, 1]]
    weights = Weights(model, lambda given: torch.optim.SGD(given, 0.1), divide=lambda _: found)
    wire = Native(lambda position, place: torch.full_like(place, 10.0 ** (position + 1)))
    monkeypatch.setattr(shard_exchange, "dist", wire)
    exchange = Exchange(None, range(3), 2, native=True)
    gather = WeightGather(weights, exchange, timer())
    weights.allocate()
    gather.start()
    gather.wait()
    assert wire.gathered == [512, 512, 176]
    (sent,) = [[each.tensor.numel() for each in batch] for batch in wire.batches]
    assert sent == [6, 6]  # to each of the others
    reducer = ShardReducer(found, [torch.zeros(size) for size in SIZES], exchange, timer())
    given = {index: torch.randn(SIZES[index]) for index in (0, 3)}
    for index, gradient in given.items():
        reducer.add(index, gradient)
    assert [each.numel() for each in wire.scattered] == [512, 512, 176]
    first, second = reducer.wait(lambda *_: None)
    assert first is not None
    assert second is not None
    assert first.eq(7.0).all()
    assert torch.equal(second, torch.full((6,), 110.0) + given[3])


in_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")
NUM_ROUNDS = 5


@in_memory
@pytest.mark.parametrize("order", [(0, 1), (2, 0, 1)])
def test_in_memory_members_of_any_speed_get_their_sums_and_all_weights(order: tuple[int, ...]) -> None:
    """Of several buckets at once, some of which have no part for somebody, round after round."""
    scatters, gathers = replicas(len(order), 0), replicas(len(order), 0)

    def given(member: int, round_index: int, place: int) -> torch.Tensor:
        numbers = torch.arange(float(SIZES[place])) % 13
        return (numbers / 3 + 10**member + round_index / 7).view(SHAPES[place])

    def member(own: int) -> None:
        rng, replica = random.Random(own), order[own]
        found, like = sharding(len(order), replica, keeps_all=False), [torch.zeros(shape) for shape in SHAPES]
        model = nn.Module()
        for index, shape in enumerate(SHAPES):
            model.register_parameter(f"p{index}", nn.Parameter(torch.zeros(shape)))
        weights = Weights(model, lambda given: torch.optim.SGD(given, 0.1), divide=lambda _: found)
        reducer = ShardReducer(found, like, Exchange(None, order, own, shared=scatters[own]), timer())
        gather = WeightGather(weights, Exchange(None, order, own, shared=gathers[own]), timer())
        reducer.connect()
        gather.connect()
        for round_index in range(NUM_ROUNDS):
            for index in (2, 3, 4, 1, 0):
                reducer.add(index, given(own, round_index, index))
                threading.Event().wait(rng.choice([0, 0, 0.002]))
            for piece, value in zip(found.own, reducer.wait(lambda *_: None), strict=True):
                parts = [piece.of(given(other, round_index, piece.place)) for other in range(len(order))]
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                assert value is not None
                assert torch.equal(value, total)
            with torch.no_grad():
                for piece, own_piece in zip(found.own, weights.own_pieces(), strict=True):
                    own_piece.copy_(piece.of(given(0, round_index, piece.place)))
            for _ in range(2):  # for a forward, and again for its backward
                weights.allocate()
                gather.start()
                gather.wait()
                for place, parameter in enumerate(weights.newest.parameters):
                    assert torch.equal(parameter, given(0, round_index, place))
                weights.free()

    together([partial(member, own) for own in range(len(order))])
    for shared in (*scatters, *gathers):
        shared.close()


@in_memory
def test_in_memory_a_fast_member_overwrites_no_unread_values() -> None:
    shared = replicas(2, 0)
    both = Sharding((tuple(divided([0], [1200], 2, whole=False)),), 0)
    like = [torch.zeros(1200)]
    fast, slow = (
        ShardReducer(both._replace(replica=own), like, Exchange(None, (0, 1), own, shared=each), timer())
        for own, each in enumerate(shared)
    )
    for round_index in range(3):
        fast.add(0, torch.full((1200,), 10.0 + round_index))
        if round_index:
            (late,) = slow.wait(lambda *_: None)
            assert late is not None
            assert set(late.tolist()) == {8.0 + 2 * round_index}  # of the round before
        slow.add(0, torch.full((1200,), float(round_index)))
        fast.wait(lambda *_: None)
    for each in shared:
        each.close()


@in_memory
def test_in_memory_a_lost_member_is_noticed() -> None:
    first, second = replicas(2, 0)
    reducer = ShardReducer(
        sharding(2, 0), [*map(torch.zeros, SHAPES)], Exchange(None, (0, 1), 0, shared=first), timer()
    )
    for index in (2, 3, 4, 1, 0):
        reducer.add(index, torch.ones(SHAPES[index]))
    second.close()
    with pytest.raises(PeerLostError, match="lost a peer"):
        reducer.wait(lambda *_: None)
    first.close()
