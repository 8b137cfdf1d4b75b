"""Sharded replicas between processes: sums of gradients scattered, and weights gathered, bucket by bucket.

Every member sends every other its part: Gloo's own reduce-scatter sends as much as an all-reduce, and adds
in an order that depends on the number of members; here they are added in their order. On NCCL a ring may do both
(`sums: ring`). Buffers live from a bucket's first gradient to its sum, so that whole gradients don't stay.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.instruction_times import HostWatch, Moment
from pipebench.distributed.launch_join import peers
from pipebench.distributed.reducer import BucketsInOrder, OnBucket
from pipebench.engine.shards import Piece, Sharding
from pipebench.engine.weights import Weights


class Exchange:
    """How a stage's replicas exchange the parts of a buffer in their process group.

    `order` has the replica of every member of the group, `own` is this member's position; `native`: whether the backend
    scatters and gathers itself; `host_copy`: whether tensors go through the host's memory.
    """

    def __init__(self, group: Any, order: Sequence[int], own: int, *, native: bool, host_copy: bool) -> None:
        self.group, self.order, self.own = group, order, own
        self.native, self.host_copy = native, host_copy

    def sizes(self, bucket: Sequence[Sequence[Piece]]) -> list[int]:
        """Return the elements of every member's part of a bucket."""
        return [sum(piece.stop - piece.start for piece in bucket[replica]) for replica in self.order]

    def travelling(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a buffer where the group's collectives can send it."""
        return flat.cpu() if self.host_copy else flat


class _Scatter:
    """The sum of one bucket, of which a member gets its part."""

    def __init__(self, bucket: Sequence[Sequence[Piece]], like: Sequence[torch.Tensor], exchange: Exchange) -> None:
        self.indices = [*dict.fromkeys(piece.place for part in bucket for piece in part)]
        self._like = [like[index] for index in self.indices]
        self._exchange, self._sizes = exchange, exchange.sizes(bucket)
        self.pieces = bucket[exchange.order[exchange.own]]
        self.num_bytes = sum(tensor.nbytes for tensor in self._like)
        self.missing = set(self.indices)
        self.set_out = Moment()
        self._places: dict[int, torch.Tensor] = {}
        self._flat = self._given = torch.empty(0)
        self._work: Any = None

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient into the buffer; None as negative zeros, which change no sum and show if all are None."""
        if not self._places:
            self._flat = torch.empty(
                sum(tensor.numel() for tensor in self._like), dtype=self._like[0].dtype, device=self._like[0].device
            )
            pieces = torch.split(self._flat, [tensor.numel() for tensor in self._like])
            shaped = (piece.view(tensor.shape) for piece, tensor in zip(pieces, self._like, strict=True))
            self._places = dict(zip(self.indices, shaped, strict=True))
        place = self._places[index]
        place.fill_(-0.0) if gradient is None else place.copy_(gradient)
        self.missing.discard(index)

    def start(self) -> None:
        """Send every other member its part."""
        exchange, own = self._exchange, self._sizes[self._exchange.own]
        self._flat = exchange.travelling(self._flat)
        if exchange.native:
            self._given = self._flat.new_empty(own)
            parts = [*torch.split(self._flat, self._sizes)]
            self._work = dist.reduce_scatter(self._given, parts, group=exchange.group, async_op=True)
        else:
            taken = [own] * len(self._sizes)
            self._given = self._flat.new_empty(sum(taken))
            self._work = dist.all_to_all_single(
                self._given, self._flat, taken, self._sizes, group=exchange.group, async_op=True
            )

    def wait(self) -> None:
        """Wait for the others' parts."""
        self._work.wait()

    def added(self) -> list[torch.Tensor]:
        """Return this member's pieces of the sum, once waited for."""
        first, *others = torch.split(self._given, self._sizes[self._exchange.own] or 1) if len(self._given) else [
            self._given
        ]  # fmt: skip
        total = first.clone()
        for other in others:
            total += other
        total = total.to(self._like[0].device)
        self._places, self._flat, self._given, self._work = {}, torch.empty(0), torch.empty(0), None
        self.missing = set(self.indices)
        shaped = zip(self.pieces, torch.split(total, [p.stop - p.start for p in self.pieces]), strict=True)
        like = dict(zip(self.indices, self._like, strict=True))
        return [values.view(*piece.shape(like[piece.place])) for piece, values in shaped]


class ShardReducer(BucketsInOrder[_Scatter]):
    """Scatters the sums of one replica's gradients; used like `reducer.Reducer`.

    `sharding` is the stage's, `like` are its parameters; `watch` times the sums.
    """

    def __init__(self, sharding: Sharding, like: Sequence[torch.Tensor], exchange: Exchange, watch: HostWatch) -> None:
        super().__init__([_Scatter(bucket, like, exchange) for bucket in sharding.buckets], watch)

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
        """Wait for all buckets; return the own pieces of the sum, in the stage's order."""
        found: list[tuple[Piece, torch.Tensor | None]] = []
        for bucket in self._buckets:
            with peers():
                bucket.wait()
            on_bucket(bucket.num_bytes, bucket.set_out, self._watch.ended(bucket.wait, bucket.set_out))
            for piece, value in zip(bucket.pieces, bucket.added(), strict=True):
                is_none = piece.place in self._absent and not value.any() and bool(value.signbit().all())
                found.append((piece, None if is_none else value))
        self._begin_anew()
        return [value for _, value in sorted(found, key=lambda each: each[0])]


class WeightGather:
    """Gathers a stage's newest weights from the replicas that have stepped on them."""

    def __init__(self, weights: Weights, exchange: Exchange, watch: HostWatch) -> None:
        assert weights.sharding is not None
        self._watch = watch
        self._weights, self._exchange, self._sharding = weights, exchange, weights.sharding
        self._work: list[tuple[list[Any], list[torch.Tensor]]] = []  # per bucket: operations, and every member's part
        self.kind = ""  # as which the bytes of the one under way are counted
        self.set_out = Moment()

    def connect(self) -> None:
        """Gather once, before any worker waits for anything else; see `Reducer.connect`."""
        self._weights.allocate()
        self.start()
        self.wait()
        self._weights.free()

    def start(self) -> None:
        """Send every other member the own pieces."""
        self.set_out = self._watch.mark(keep=True)
        exchange, own = self._exchange, self._sharding.own
        values = dict(zip(own, self._weights.own_pieces(), strict=True))
        for bucket in self._sharding.buckets:
            like = self._weights.newest.parameters[next(p for b in bucket for p in b).place]
            given = [values[piece].reshape(-1) for piece in bucket[exchange.order[exchange.own]]]
            flat = exchange.travelling(torch.cat(given) if given else like.new_empty(0))
            parts = [flat.new_empty(size) for size in exchange.sizes(bucket)]
            with peers():
                if exchange.native:
                    work = [dist.all_gather(parts, flat, group=exchange.group, async_op=True)]
                else:
                    work = self._exchanged(flat, parts)
            self._work.append((work, parts))

    def _exchanged(self, own: torch.Tensor, parts: list[torch.Tensor]) -> list[Any]:
        """Send the own part to all others, and take theirs.

        In one batch: by NCCL all of it is on one stream, where two members that both sent first would wait for ever.
        """
        operations, group = list[Any](), self._exchange.group
        parts[self._exchange.own] = own
        for position, part in enumerate(parts):
            if position != self._exchange.own and len(own):
                operations.append(dist.P2POp(dist.isend, own, group=group, group_peer=position))
            if position != self._exchange.own and len(part):
                operations.append(dist.P2POp(dist.irecv, part, group=group, group_peer=position))
        return dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Moment:
        """Take the others' pieces; return when the last of them was there."""
        exchange, weights = self._exchange, self._weights
        for (work, parts), bucket in zip(self._work, self._sharding.buckets, strict=True):
            _wait_for(work)
            for position, (replica, part) in enumerate(zip(exchange.order, parts, strict=True)):
                if position == exchange.own and self._sharding.keeps_all:
                    continue
                pieces = bucket[replica]
                values = torch.split(part, [piece.stop - piece.start for piece in pieces])
                shapes = (piece.shape(weights.newest.parameters[piece.place]) for piece in pieces)
                weights.gathered(pieces, [v.view(*shape) for v, shape in zip(values, shapes, strict=True)])
        end = self._watch.ended(lambda: _wait_for(each for work, _ in self._work for each in work), self.set_out)
        self._work.clear()
        return end


def _wait_for(work: Iterable[Any]) -> None:
    with peers():
        for each in work:
            each.wait()
