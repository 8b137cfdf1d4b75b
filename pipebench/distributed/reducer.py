"""Sums a replicated stage's gradients over its replicas, bucket by bucket, while its backward still runs.

A bucket is a flat tensor, into which autograd's gradients are copied. Its sum starts when the bucket and every earlier
one are complete, so that all replicas start the same sums in the same order.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from pipebench.distributed.instruction_times import HostTimer, Moment
from pipebench.distributed.launch_join import peers
from pipebench.distributed.message import aligned
from pipebench.distributed.shared_sum import SharedFile, SharedSum
from pipebench.model.memory_format import is_channels_last, shaped
from pipebench.schedule.syncs import ALL_REDUCE, PARAMETER_SERVER

OnBucket = Callable[[int, Moment, Moment], None]  # bytes, start, end
B = TypeVar("B", bound="Bucket")


class Sum(Protocol):
    """Sums a bucket over the replicas. All replicas call the same methods, for buckets in the same order.

    Methods that end in `return` do nothing by default; the others are abstract.
    """

    data: torch.Tensor  # the bucket

    def free(self) -> None:
        """Wait until the bucket may be filled again; by default that is after `wait`."""
        return

    def start(self) -> None:
        """Start the sum of the full bucket."""

    def go_on(self) -> None:
        """Do the work, if any, for which all replicas must have started."""
        return

    def wait(self) -> None:
        """Wait for the sum."""


def sum_now(total: Sum) -> None:
    """Sum a full bucket and wait for the sum; all replicas call it."""
    total.start()
    total.go_on()
    total.wait()


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
    """Sums `data` in place. Every member is the parameter server of one chunk, and adds up in the order of the members.

    Gradients are pushed during the backward; `go_on` sends the sums back.
    """

    def __init__(self, data: torch.Tensor, group: Any) -> None:
        self.data, self._group = data, group
        size, own = dist.get_world_size(group), dist.get_rank(group)
        self._sizes = [len(chunk) for chunk in data.tensor_split(size)]
        self._own = [self._sizes[own]] * size
        self._given = torch.empty(sum(self._own), dtype=data.dtype, device=data.device)
        self._work: Any = None

    def start(self) -> None:
        """Send every member its chunk."""
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
    return sum(aligned(sum(like[index].nbytes for index in indices)) for indices in buckets)


class Summing(NamedTuple):
    """How the replicas of a stage sum."""

    group: Any  # their process group
    # Whether sums travel through the host's memory, as of several ranks on one GPU. Gloo's own handling of CUDA tensors
    # has corrupted results
    host_copy: bool
    sync: str = ALL_REDUCE  # a name in `syncs.SYNCS`
    shared: SharedFile | None = None  # of replicas that sum in shared memory; None to sum by the group

    def sum_of(self, like: torch.Tensor, count: int, position: int, num_buckets: int) -> Sum:
        """Return the sum of bucket `position`, which has `count` numbers of the type of `like`."""
        if self.shared is not None:
            return SharedSum(count, like.dtype, self.shared, position, num_buckets)
        device = "cpu" if self.host_copy else like.device
        data = torch.empty(count, dtype=like.dtype, device=device, pin_memory=self.host_copy)
        return _SUMS[self.sync](data, self.group)


class _Bucket:
    """One bucket of a `Reducer`, and each parameter's view of it."""

    def __init__(self, indices: Sequence[int], like: Sequence[torch.Tensor], total: Sum, host_copy: bool) -> None:
        self.indices = list(indices)
        self.sum = total
        self.travels = self.sum.data  # the tensor that is summed: `data`, or a copy of it on the host
        self.data = torch.empty_like(self.travels, device=like[indices[0]].device) if host_copy else self.travels
        pieces = torch.split(self.data, [like[i].numel() for i in indices])
        runs = zip(indices, pieces, strict=True)
        self.places = {i: shaped(run, like[i].shape, last=is_channels_last(like[i])) for i, run in runs}
        self.missing = set(indices)
        self.is_free = False  # whether the bucket may be filled
        self.set_out = Moment()

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient into its place, None as zeros; raises `PeerLostError` if another replica is gone."""
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
    """Some parameters' gradients, which are summed together."""

    indices: list[int]  # of the parameters
    missing: set[int]  # parameters without a gradient so far in the round
    set_out: Moment  # when the round's sum started

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy a parameter's gradient, which may be None, into its place."""

    def start(self) -> None:
        """Start the sum."""


class BucketsInOrder(Generic[B]):
    """Fills a replica's buckets, and starts their sums in order, each when it and all before it are complete.

    Args:
        buckets: in the order in which a backward reaches them.
        timer: times the sums.
    """

    def __init__(self, buckets: Sequence[B], timer: HostTimer) -> None:
        self._buckets, self._timer = buckets, timer
        self._bucket_of = {index: bucket for bucket in buckets for index in bucket.indices}
        self._next = 0  # the first bucket not started
        self._absent: set[int] = set()  # parameters without a gradient on this replica in the round
        self._lacking: set[int] | None = None  # `_absent` of the last round in which this replica had a unit

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
        """Return the parameters that may have no gradient on any replica in the round.

        The graph determines which parameters get a gradient, the same ones on all replicas and in all rounds. A replica
        without a unit in a short round therefore uses those of an earlier round. If it took all for absent, it would
        skip a parameter whose summed gradient happens to be zero, such as that of a branch with a zero weight, but the
        other replicas would apply weight decay to it.
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
    """Sums the gradients of one replica. Methods raise `PeerLostError` if another replica is gone.

    Args:
        buckets: positions of the parameters of every bucket, in the order in which a backward reaches them.
        like: the stage's parameters.
        summing: how replicas sum.
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

        A group's first sum makes connections and blocks, even if it is asynchronous; with NCCL the first sum by each
        algorithm does, which depends on the size. In a backward that would deadlock some plans, the smallest being
        `1-3-1` at full depth: there another replica depends on what follows that wait.
        """
        for bucket in self._buckets:
            bucket.travels.zero_()
            with peers():
                sum_now(bucket.sum)

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
