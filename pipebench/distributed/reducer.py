"""All-reduces a replicated stage's gradients bucket by bucket, while its backward still runs.

A bucket is one run of numbers. Gradients are copied into it as autograd computes them; it sets out when its last one is
there and every bucket before it has set out, so that all replicas start the same all-reduces in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.launch_join import peers

OnBucket = Callable[[int, float], None]  # bytes, when it set out [s]


class _Bucket:
    """One bucket: its numbers, and each parameter's place in them."""

    def __init__(self, indices: Sequence[int], like: Sequence[torch.Tensor], host_copy: bool) -> None:
        self.indices = list(indices)
        total = sum(like[i].numel() for i in indices)
        self.data = torch.empty(total, dtype=like[indices[0]].dtype, device=like[indices[0]].device)
        self.travels = torch.empty_like(self.data, device="cpu", pin_memory=True) if host_copy else self.data
        pieces = torch.split(self.data, [like[i].numel() for i in indices])
        self.places = {i: piece.view(like[i].shape) for i, piece in zip(indices, pieces, strict=True)}
        self.missing = set(indices)
        self.work: Any = None
        self.set_out_s = 0.0


class Reducer:
    """The buckets of one replica.

    Args:
        buckets: positions of the parameters of every bucket, in the order in which a backward reaches them.
        like: the stage's parameters.
        group: the replicas' process group.
        host_copy: whether tensors travel through the host's memory: several ranks on one GPU (Gloo's own handling of
            CUDA tensors has corrupted results).
        clock: the run's clock, seconds.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        like: Sequence[torch.Tensor],
        group: Any,
        *,
        host_copy: bool,
        clock: Callable[[], float],
    ) -> None:
        self._buckets = [_Bucket(indices, like, host_copy) for indices in buckets]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        self._num_parameters = len(like)
        self._group = group
        self._clock = clock
        self._next = 0  # the first bucket that hasn't set out
        self._absent: set[int] = set()  # parameters of which this replica has no gradient in the round

    def connect(self) -> None:
        """Reduce zeros of every bucket's size; all replicas call it before any of them runs a backward.

        A group's first all-reduce (by NCCL, the first of every size that takes another way) makes connections, and its
        caller waits for the others there, asynchronous or not. In a backward that would hang some plans, of which
        `1-3-1` is the smallest at full depth: what a later replica needs to get there stands behind that wait.

        Raises:
            PeerLostError: another replica is gone.
        """
        for bucket in self._buckets:
            bucket.travels.zero_()
            with peers():
                dist.all_reduce(bucket.travels, group=self._group)

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient of the round, whole as far as this replica is concerned."""
        bucket = self._bucket_of[index]
        bucket.places[index].copy_(gradient)
        bucket.missing.discard(index)
        self._set_out()

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Bring what the backward didn't reach: the sums of earlier units, or zeros; then all buckets set out."""
        for bucket in self._buckets[self._next :]:
            for index in list(bucket.missing):
                gradient = gradients[index]
                if gradient is None:
                    bucket.places[index].zero_()
                    self._absent.add(index)
                else:
                    bucket.places[index].copy_(gradient)
                bucket.missing.discard(index)
        self._set_out()

    def wait(self, on_bucket: OnBucket) -> list[torch.Tensor | None]:
        """Wait for all buckets; return the summed gradients, which stand in the buckets until the next round.

        Raises:
            PeerLostError: another replica is gone.
        """
        result: list[torch.Tensor | None] = [None] * self._num_parameters
        for bucket in self._buckets:
            with peers():
                bucket.work.wait()
            if bucket.travels is not bucket.data:
                bucket.data.copy_(bucket.travels)
            on_bucket(bucket.data.nbytes, bucket.set_out_s)
            for index, place in bucket.places.items():
                # Zeros of all replicas are no gradient: an optimizer leaves the parameter alone then.
                result[index] = None if index in self._absent and not place.any() else place
            bucket.work, bucket.missing = None, set(bucket.indices)
        self._next = 0
        self._absent.clear()
        return result

    def _set_out(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            if bucket.travels is not bucket.data:
                bucket.travels.copy_(bucket.data)
            bucket.set_out_s = self._clock()
            with peers():
                bucket.work = dist.all_reduce(bucket.travels, group=self._group, async_op=True)
            self._next += 1
