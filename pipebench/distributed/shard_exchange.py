"""Sharded replicas between processes: reduce-scatter of gradients and all-gather of weights, bucket by bucket.

Every member sends every other member its part, and adds what it gets in the order of the members. Gloo's own
reduce-scatter sends as much as an all-reduce, and adds in an order that depends on the number of members. With NCCL a
ring may do both operations (`sums: ring`).

A large piece travels by itself, directly from a gradient or a shard and directly into the weights, so that no buffer
holds it a second time. A bucket's small pieces travel together. Gradients stay in memory until their bucket's sum
starts.

Processes that compute on the CPUs of one host write the parts into files in memory instead, and read each other's.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.instruction_times import HostTimer, Moment
from pipebench.distributed.launch_join import peers
from pipebench.distributed.reducer import BucketsInOrder, OnBucket
from pipebench.distributed.shared_memory import bytes_of, write
from pipebench.distributed.shared_sum import FULL, PLACE_BYTES, SharedFile, read
from pipebench.engine.shards import Piece, Sharding
from pipebench.engine.weights import Weights

# Pieces of at least so many bytes travel by themselves. Copying one into a buffer and out takes as long as a message.
_LARGE_BYTES = 1 << 18
Pieces = Sequence[Piece]  # pieces that travel as one tensor
Parts = Sequence[Sequence[torch.Tensor]]  # messages by position


class Room:
    """A bucket's place in the members' files. The part of, or for, a position is at the same byte of every file.

    Args:
        start: the bucket's first byte.
    """

    def __init__(self, start: int) -> None:
        self._start, self._num_exchanges = start, 0

    def places(self, parts: Parts) -> list[list[int]]:
        """Return the first byte of every message of the next exchange, by position.

        Exchanges use two places in turn. A member that starts one has read what all others wrote for the last one. So
        all members had started the last one, and had read everything of the one before it, whose place is free.
        """
        self._num_exchanges += 1
        at, found = self._start + self._num_exchanges % 2 * PLACE_BYTES, list[list[int]]()
        for part in parts:
            found.append([])
            for message in part:
                found[-1].append(at)
                at += message.nbytes
        return found


class _Reading:
    """Messages of other members, to be read once they have written exchange `number`.

    Args:
        messages: the sender's position, the tensor that the message is read into, and its first byte in the file.
    """

    def __init__(self, shared: SharedFile, number: int, messages: list[tuple[int, torch.Tensor, int]]) -> None:
        self._shared, self._number, self._messages = shared, number, messages

    def wait(self) -> None:
        """Read the messages."""
        messages, self._messages = self._messages, []
        for position, into, start in messages:
            self._shared.hear(position, FULL, self._number)
            # Not `into.numpy()`: torch could then never free the tensor's memory, as it frees that of sharded weights.
            place = (ctypes.c_char * into.nbytes).from_address(into.data_ptr()) if into.nbytes else b""
            read(self._shared.files[position], memoryview(place).cast("B"), start)


class Exchange:
    """How a stage's replicas exchange the parts of a bucket, by their process group or by files in memory.

    All members start exchanges in the same order.

    Args:
        group: the process group, None with `shared`.
        order: the replica of every member of the group, by position.
        own: this member's position.
        native: whether the backend scatters and gathers itself.
        host_copy: whether tensors travel through the host's memory.
        shared: the member's file, for all exchanges of the group; None to use the process group.
    """

    def __init__(
        self,
        group: Any,
        order: Sequence[int],
        own: int,
        *,
        native: bool = False,
        host_copy: bool = False,
        shared: SharedFile | None = None,
    ) -> None:
        self.group, self.order, self.own = group, order, own
        self._native, self.host_copy, self._shared = native, host_copy, shared

    def room(self, bucket: Sequence[Sequence[Piece]], like: Sequence[torch.Tensor]) -> Room:
        """Return a place for a bucket in the files; all members call it for the same buckets in the same order."""
        sizes = ((piece.stop - piece.start) * like[piece.place].itemsize for part in bucket for piece in part)
        return Room(0 if self._shared is None else self._shared.take(sum(sizes)))

    def is_native(self, bucket: Sequence[Sequence[Piece]]) -> bool:
        """Return whether the backend scatters and gathers a bucket itself, which needs a part for every member.

        torch 2.15 takes two empty parts, which have no address, for the same buffer twice, and fails.
        """
        return self._native and all(bucket)

    def messages(self, bucket: Sequence[Sequence[Piece]], like: Sequence[torch.Tensor]) -> list[list[Pieces]]:
        """Return the messages of every member's part of a bucket; one each if the backend scatters and gathers."""
        if self.is_native(bucket):
            return [[bucket[replica]] for replica in self.order]
        found: list[list[Pieces]] = []
        for replica in self.order:
            sizes = [(piece, (piece.stop - piece.start) * like[piece.place].itemsize) for piece in bucket[replica]]
            large: list[Pieces] = [[piece] for piece, num_bytes in sizes if num_bytes >= _LARGE_BYTES]
            small = [piece for piece, num_bytes in sizes if num_bytes < _LARGE_BYTES]
            found.append([*large, small] if small else large)
        return found

    def joined(self, runs: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return a message as one flat tensor, on the host if it travels there; one run alone isn't copied."""
        flat = [run.reshape(-1) for run in runs] or [like.new_empty(0)]
        found = flat[0] if len(flat) == 1 else torch.cat(flat)
        return found.cpu() if self.host_copy else found

    def scatter(self, room: Room, parts: Parts, given: Parts) -> list[Any]:
        """Send every other member its part, and receive what all others have for this one; both are by position."""
        shared, own = self._shared, self.own
        if shared is None:
            return self._between(parts, given)
        places = room.places(parts)
        for position in self._others():
            _write(shared, parts[position], places[position])
        return self._written(shared, given, [places[own]] * len(parts))

    def gather(self, room: Room, sent: Sequence[torch.Tensor], taken: Parts) -> list[Any]:
        """Send this member's messages to all others, and receive theirs, which are by position."""
        shared, own = self._shared, self.own
        if shared is None:
            return self._between([sent] * len(taken), taken)
        places = room.places(taken)
        _write(shared, sent, places[own])
        return self._written(shared, taken, places)

    def _others(self) -> list[int]:
        return [position for position in range(len(self.order)) if position != self.own]

    def _written(self, shared: SharedFile, taken: Parts, places: Sequence[Sequence[int]]) -> list[Any]:
        """Notify the others that the messages are written; return what reads theirs into `taken` from `places`."""
        reads = [
            (position, into, start)
            for position in self._others()
            for into, start in zip(taken[position], places[position], strict=True)
        ]
        return [_Reading(shared, shared.full(), reads)]

    def _between(self, sent: Parts, taken: Parts) -> list[Any]:
        """Send and receive by the group.

        It is one batch, because NCCL has it all on one stream. Two members that both sent first would wait for ever.
        """
        operations = list[Any]()
        for peer in self._others():
            operations += [dist.P2POp(dist.isend, each, group=self.group, group_peer=peer) for each in sent[peer]]
            operations += [dist.P2POp(dist.irecv, each, group=self.group, group_peer=peer) for each in taken[peer]]
        return dist.batch_isend_irecv(operations) if operations else []


def _write(shared: SharedFile, messages: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
    for message, start in zip(messages, starts, strict=True):
        write(shared.file, bytes_of(message), start)


class _Scatter:
    """The reduce-scatter of one bucket: the sum of its gradients, of which every member gets its part."""

    def __init__(self, bucket: Sequence[Sequence[Piece]], like: Sequence[torch.Tensor], exchange: Exchange) -> None:
        self.indices = [*dict.fromkeys(piece.place for part in bucket for piece in part)]
        self._like = {index: like[index] for index in self.indices}
        self._first = like[self.indices[0]]
        self._exchange, self._messages = exchange, exchange.messages(bucket, like)
        self._native, self._room = exchange.is_native(bucket), exchange.room(bucket, like)
        self.pieces = bucket[exchange.order[exchange.own]]
        self.num_bytes = sum(tensor.nbytes for tensor in self._like.values())
        self.missing = set(self.indices)
        self.set_out = Moment()
        self._gradients: dict[int, torch.Tensor] = {}  # by the parameter's index
        self._given: list[list[torch.Tensor]] = []  # messages for this member, by the sender's position
        self._sent: list[list[torch.Tensor]] = []  # referenced until they have left
        self._work: list[Any] = []  # operations to wait for

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Keep a gradient; None as zeros."""
        if gradient is None:
            gradient = torch.zeros_like(self._like[index], memory_format=torch.contiguous_format)
        # torch can't send a tensor that is only marked as conjugated or negated.
        self._gradients[index] = gradient.resolve_conj().resolve_neg().contiguous()
        self.missing.discard(index)

    def start(self) -> None:
        """Send every other member its part."""
        exchange, own = self._exchange, self._exchange.own
        parts = [[self._values(message) for message in messages] for messages in self._messages]
        self._gradients, self._sent = {}, parts
        if self._native:
            self._given = [[torch.empty_like(parts[own][0])]]
            given = [part for (part,) in parts]
            self._work = [dist.reduce_scatter(self._given[0][0], given, group=exchange.group, async_op=True)]
        else:
            self._given = [part if part is parts[own] else [*map(torch.empty_like, parts[own])] for part in parts]
            self._work = exchange.scatter(self._room, parts, self._given)

    def _values(self, message: Pieces) -> torch.Tensor:
        runs = [piece.of(self._gradients[piece.place]) for piece in message]
        return self._exchange.joined(runs, self._first)

    def wait(self) -> None:
        """Wait for the others' parts."""
        for each in self._work:
            each.wait()

    def added(self) -> list[torch.Tensor]:
        """Return this member's pieces of the sum, after `wait`.

        The sum is computed in the memory of another member's message.
        """
        found: dict[Piece, torch.Tensor] = {}
        own = self._exchange.own
        for message, (total, *others) in zip(self._messages[own], zip(*self._given, strict=True), strict=True):
            for index, other in enumerate(others):
                # The first summand may be this member's own gradient, which must not be overwritten.
                total = torch.add(total, other, out=other if own == index == 0 else total)
            values = torch.split(total.to(self._first.device), [piece.stop - piece.start for piece in message])
            for piece, value in zip(message, values, strict=True):
                found[piece] = value.view(piece.shape(self._like[piece.place]))
        self._given, self._sent, self._work = [], [], []
        self.missing = set(self.indices)
        return [found[piece] for piece in self.pieces]


class ShardReducer(BucketsInOrder[_Scatter]):
    """Scatters the sums of a replica's gradients; used like `reducer.Reducer`.

    Args:
        sharding: the stage's.
        like: the stage's parameters.
        exchange: how replicas exchange.
        timer: times the sums.
    """

    def __init__(self, sharding: Sharding, like: Sequence[torch.Tensor], exchange: Exchange, timer: HostTimer) -> None:
        super().__init__([_Scatter(bucket, like, exchange) for bucket in sharding.buckets], timer)

    def connect(self) -> None:
        """Scatter zeros; all replicas call it before any of them runs a backward, see `Reducer.connect`."""
        for bucket in self._buckets:
            for index in bucket.indices:
                bucket.put(index, None)
            with peers():
                bucket.start()
                bucket.wait()
            bucket.added()

    def wait(self, on_bucket: OnBucket) -> list[torch.Tensor | None]:
        """Wait for all buckets; return this replica's pieces of the sum, in the stage's order."""
        found: list[tuple[Piece, torch.Tensor | None]] = []
        may_lack = self._may_lack()
        for bucket in self._buckets:
            with peers():
                bucket.wait()
            on_bucket(bucket.num_bytes, bucket.set_out, self._timer.ended(bucket.wait, bucket.set_out))
            for piece, value in zip(bucket.pieces, bucket.added(), strict=True):
                found.append((piece, None if piece.place in may_lack and not value.any() else value))
        self._begin_anew()
        return [value for _, value in sorted(found, key=lambda each: each[0])]


class WeightGather:
    """Gathers a sharded stage's newest weights from the replicas that have updated them."""

    def __init__(self, weights: Weights, exchange: Exchange, timer: HostTimer) -> None:
        assert weights.sharding is not None
        self._timer = timer
        self._weights, self._exchange, self._sharding = weights, exchange, weights.sharding
        like = weights.newest.parameters
        # Per bucket: the index of a parameter, messages by position, whether the backend gathers, and room.
        self._buckets = [
            (
                next(piece for part in bucket for piece in part).place,
                exchange.messages(bucket, like),
                exchange.is_native(bucket),
                exchange.room(bucket, like),
            )
            for bucket in self._sharding.buckets
        ]
        # Per bucket of the gather under way: operations, tensors that they send, and messages that arrive in a buffer,
        # with it.
        self._work: list[tuple[list[Any], list[torch.Tensor], list[tuple[Pieces, torch.Tensor]]]] = []
        self.kind = ""  # kind of transfer as which the bytes of the gather under way count
        self.set_out = Moment()

    def connect(self) -> None:
        """Gather once, before any worker waits for anything else; see `Reducer.connect`."""
        self._weights.allocate()
        self.start()
        self.wait()
        self._weights.free()

    def start(self) -> None:
        """Send this member's pieces to all others."""
        self.set_out = self._timer.mark(keep=True)
        exchange, own = self._exchange, self._exchange.own
        values = dict(zip(self._sharding.own, self._weights.own_pieces(), strict=True))
        parameters = self._weights.newest.parameters
        for place, messages, native, room in self._buckets:
            like = parameters[place]
            sent = [exchange.joined([values[piece] for piece in message], like) for message in messages[own]]
            arriving = [] if self._sharding.keeps_all else [*zip(messages[own], sent, strict=True)]
            taken = [
                [*map(torch.empty_like, sent)]
                if position == own
                else [self._place(it, like, arriving, native=native) for it in each]
                for position, each in enumerate(messages)
            ]
            with peers():
                if native:
                    parts = [part for (part,) in taken]
                    work = [dist.all_gather(parts, sent[0], group=exchange.group, async_op=True)]
                else:
                    work = exchange.gather(room, sent, taken)
            self._work.append((work, sent, arriving))

    def _place(
        self, message: Pieces, like: torch.Tensor, arriving: list[tuple[Pieces, torch.Tensor]], *, native: bool
    ) -> torch.Tensor:
        """Return the memory in which a message arrives: the weights, or a buffer that is added to `arriving`."""
        exchange, parameters = self._exchange, self._weights.newest.parameters
        if len(message) == 1 and not native and not exchange.host_copy:
            return message[0].of(parameters[message[0].place]).view(-1)
        size = sum(piece.stop - piece.start for piece in message)
        buffer = like.new_empty(size, device="cpu" if exchange.host_copy else like.device)
        arriving.append((message, buffer))
        return buffer

    def wait(self) -> Moment:
        """Wait for the others' pieces; return the moment at which the last one was there."""
        parameters = self._weights.newest.parameters
        arrived, values = list[Piece](), list[torch.Tensor]()
        for work, _, arriving in self._work:
            _wait_for(work)
            for message, part in arriving:
                runs = torch.split(part, [piece.stop - piece.start for piece in message])
                arrived += message
                shapes = (piece.shape(parameters[piece.place]) for piece in message)
                values += [run.view(shape) for run, shape in zip(runs, shapes, strict=True)]
        self._weights.gathered(arrived, values)
        end = self._timer.ended(lambda: _wait_for(each for work, *_ in self._work for each in work), self.set_out)
        self._work.clear()
        return end


def _wait_for(work: Iterable[Any]) -> None:
    with peers():
        for each in work:
            each.wait()
