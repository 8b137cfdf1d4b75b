"""Sums a replicated stage's gradients over its replicas, bucket by bucket, while its backward still runs.

A bucket is one run of numbers, into which autograd's gradients are copied. Its sum starts when it and every earlier
bucket are complete, so that all replicas start the same sums in the same order.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from pipebench.distributed.instruction_times import HostTimer, Moment
from pipebench.distributed.launch_join import peers
from pipebench.distributed.shared_sum import SharedFile, SharedSum, room_bytes
from pipebench.model.memory_format import is_channels_last, shaped
from pipebench.schedule.syncs import ALL_REDUCE, PARAMETER_SERVER

OnBucket = Callable[[int, Moment, Moment], None]  # bytes, start, end
B = TypeVar("B", bound="Bucket")


class Sum(Protocol):
    """Sums a bucket over the replicas; all take the same steps, in one order of buckets."""

    data: torch.Tensor

    def free(self) -> None:
        """Wait until the bucket may be filled again; by default that is after `wait`."""
        return

    def start(self) -> None:
        """Start, with the bucket full."""

    def go_on(self) -> None:
        """Do the second half's work, if any."""

    def wait(self) -> None:
        """Wait for the sum."""


class RingSum(Sum):
    """Sums `data` in place, in a ring over the group; all members do the same."""

    def __init__(self, data: torch.Tensor, group: Any) -> None:
        self.data, self._group = data, group
        self._work: Any = None

    def start(self) -> None:
        """Start the all-reduce."""
        self._work = dist.all_reduce(self.data, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum."""
        self._work.wait()


class ServerSum(Sum):
    """Sums `data` in place: every member is the server of one chunk and adds up in the order of the members.

    Pushes start during the backward; `go_on` sends sums back.
    """

    def __init__(self, data: torch.Tensor, group: Any) -> None:
        self.data, self._group = data, group
        size, own = dist.get_world_size(group), dist.get_rank(group)
        self._sizes = [len(chunk) for chunk in data.tensor_split(size)]
        self._own = [self._sizes[own]] * size
        self._given = torch.empty(sum(self._own), dtype=data.dtype, device=data.device)
        self._work: Any = None

    def start(self) -> None:
        """Send every server its chunk."""
        self._exchange(self._given, self.data, self._own, self._sizes)

    def go_on(self) -> None:
        """Add up this member's chunk, once all have arrived, and send it to all."""
        self._work.wait()
        first, *others = torch.split(self._given, self._own)
        for other in others:
            first += other
        for other in others:
            other.copy_(first)
        self._exchange(self.data, self._given, self._sizes, self._own)

    def wait(self) -> None:
        """Wait for all sums."""
        self._work.wait()

    def _exchange(self, output: torch.Tensor, given: torch.Tensor, takes: list[int], gives: list[int]) -> None:
        self._work = dist.all_to_all_single(output, given, takes, gives, group=self._group, async_op=True)


_SUMS: Final[dict[str, type[RingSum] | type[ServerSum]]] = {ALL_REDUCE: RingSum, PARAMETER_SERVER: ServerSum}


def shared_bytes(buckets: Iterable[Iterable[int]], like: Sequence[torch.Tensor]) -> int:
    """Return the size of the file for a replica's buckets; arguments as for `Reducer`."""
    return sum(room_bytes(sum(like[index].nbytes for index in indices)) for indices in buckets)


class Summing(NamedTuple):
    """How the replicas of a stage sum."""

    group: Any  # their process group
    host_copy: bool  # through the host's memory: several ranks on one GPU (Gloo's own handling of CUDA tensors has
    # corrupted results)
    sync: str = ALL_REDUCE  # a name in `syncs.SYNCS`
    shared: SharedFile | None = None  # shared files of replicas that sum in memory; None: by the group

    def sum_of(self, like: torch.Tensor, count: int, position: int, num_buckets: int) -> Sum:
        """Return the sum of a bucket of `count` numbers of the type of `like`."""
        if self.shared is not None:
            return SharedSum(count, like.dtype, self.shared, position, num_buckets)
        device = "cpu" if self.host_copy else like.device
        data = torch.empty(count, dtype=like.dtype, device=device, pin_memory=self.host_copy)
        return _SUMS[self.sync](data, self.group)


class _Bucket:
    """One bucket: its numbers, and each parameter's view of them."""

    def __init__(self, indices: Sequence[int], like: Sequence[torch.Tensor], total: Sum, host_copy: bool) -> None:
        self.indices = list(indices)
        self.sum = total
        self.travels = self.sum.data
        self.data = torch.empty_like(self.travels, device=like[indices[0]].device) if host_copy else self.travels
        pieces = torch.split(self.data, [like[i].numel() for i in indices])
        runs = zip(indices, pieces, strict=True)
        self.places = {i: shaped(run, like[i].shape, last=is_channels_last(like[i])) for i, run in runs}
        self.missing = set(indices)
        self.is_free = False
        self.set_out = Moment()

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient into its place, None as zeros; may raise `PeerLostError` if another replica is gone."""
        if not self.is_free:
            self.sum.free()
            self.is_free = True
        place = self.places[index]
        place.zero_() if gradient is None else place.copy_(gradient)
        self.missing.discard(index)

    def start(self) -> None:
        """Start the sum."""
        if self.travels is not self.data:
            self.travels.copy_(self.data)
        self.sum.start()


class Bucket(Protocol):
    """Some parameters' gradients, which are summed as one."""

    indices: list[int]
    missing: set[int]  # of these, in the round
    set_out: Moment

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy a parameter's gradient, which may be None, into its place."""

    def start(self) -> None:
        """Start the sum."""


class BucketsInOrder(Generic[B]):
    """Fills a replica's buckets; they set out in their order, each when it and all before it are complete.

    A backward reaches them in that order; `timer` times the sums.
    """

    def __init__(self, buckets: Sequence[B], timer: HostTimer) -> None:
        self._buckets, self._timer = buckets, timer
        self._bucket_of = {index: bucket for bucket in buckets for index in bucket.indices}
        self._next = 0  # the first bucket not started
        self._absent: set[int] = set()  # parameters without a gradient on this replica in the round
        self._lacking: set[int] | None = None  # likewise in the last round in which it had a unit

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a parameter's complete gradient of the round."""
        bucket = self._bucket_of[index]
        bucket.put(index, gradient)
        if not bucket.missing:
            self._set_out()

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients that the backward didn't produce, sums of earlier units or zeros; then start all sums."""
        for bucket in self._buckets[self._next :]:
            for index in list(bucket.missing):
                if gradients[index] is None:
                    self._absent.add(index)
                bucket.put(index, gradients[index])
        self._set_out()

    def _may_lack(self) -> set[int]:
        """Return the parameters of which no replica may have a gradient in the round.

        Which get one is the graph's to say, the same on all replicas and in all rounds: one without a unit in a short
        round takes what it had before. Otherwise it would skip parameters whose gradient happens to be all zeros, such
        as of a branch that a zero weight shuts, where the others decay them.
        """
        if len(self._absent) < len(self._bucket_of):
            self._lacking = {*self._absent}
        return self._absent if self._lacking is None else self._lacking

    def _set_out(self) -> None:
        """Start the sums of all buckets that are next and complete."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            bucket.set_out = self._timer.mark(keep=True)
            with peers():
                bucket.start()
            self._next += 1

    def _begin_anew(self) -> None:
        self._next = 0
        self._absent.clear()


class Reducer(BucketsInOrder[_Bucket]):
    """The buckets of one replica. Methods raise `PeerLostError` if another replica is gone.

    Args:
        buckets: positions of the parameters of every bucket, in the order in which a backward reaches them.
        like: the stage's parameters.
        summing: how they sum.
        timer: times the sums.
    """

    def __init__(
        self, buckets: Sequence[Sequence[int]], like: Sequence[torch.Tensor], summing: Summing, timer: HostTimer
    ) -> None:
        made = []
        for position, indices in enumerate(buckets):
            count = sum(like[i].numel() for i in indices)
            total = summing.sum_of(like[indices[0]], count, position, len(buckets))
            made.append(_Bucket(indices, like, total, summing.host_copy))
        super().__init__(made, timer)
        self._num_parameters = len(like)

    def connect(self) -> None:
        """Sum zeros of every bucket's size; all replicas call it before any of them runs a backward.

        A group's first sum (with NCCL, the first by each algorithm, which depends on size) makes connections and
        blocks, even if asynchronous. In a backward that would deadlock some plans, the smallest being `1-3-1` at full
        depth, where a later replica depends on what follows that wait.
        """
        for bucket in self._buckets:
            bucket.travels.zero_()
            with peers():
                bucket.sum.start()
                bucket.sum.go_on()
                bucket.sum.wait()

    def wait(self, on_bucket: OnBucket) -> list[torch.Tensor | None]:
        """Wait for all buckets; return the summed gradients, views of the buckets until the next round."""
        result: list[torch.Tensor | None] = [None] * self._num_parameters
        may_lack = self._may_lack()
        for bucket in self._buckets:
            with peers():
                bucket.sum.go_on()
        for bucket in self._buckets:
            with peers():
                bucket.sum.wait()
            if bucket.travels is not bucket.data:
                bucket.data.copy_(bucket.travels)
            on_bucket(bucket.data.nbytes, bucket.set_out, self._timer.ended(bucket.sum.wait, bucket.set_out))
            for index, place in bucket.places.items():
                # Zeros of all replicas mean no gradient, so that the optimizer skips the parameter.
                result[index] = None if index in may_lack and not place.any() else place
            bucket.missing = set(bucket.indices)
            bucket.is_free = False
        self._begin_anew()
        return result
