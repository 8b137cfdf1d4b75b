"""Replicas sum buckets in files in memory that all of them read; here they are threads of one process."""

import os
import random
import threading

import pytest
import torch

from pipebench.distributed.instruction_times import HostTimer
from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.message import aligned
from pipebench.distributed.reducer import Reducer, Summing, shared_bytes
from pipebench.distributed.shared_sum import SharedSum
from tests.distributed.shared_files import replicas, together
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_replica_has_the_sum_in_every_round(count: int) -> None:
    """Buckets of any size and type, smaller than there are replicas and larger than a piece; replicas of any speed."""
    sizes = [
        (1, torch.float64),
        (200_001, torch.float32),
        (7, torch.bfloat16),
        (0, torch.float32),
        (65_536, torch.int64),
    ]
    shares = replicas(count, sum(aligned(size * dtype.itemsize) for size, dtype in sizes))
    num_rounds = 6

    def given(replica: int, round_index: int, bucket: int) -> torch.Tensor:
        size, dtype = sizes[bucket]
        return ((torch.arange(size) % 13) * (replica + 1) + round_index).to(dtype)  # sums of a few bits, exact in all

    def work(replica: int) -> None:
        draw = random.Random(replica)
        sums = [
            SharedSum(size, dtype, shares[replica], position, len(sizes))
            for position, (size, dtype) in enumerate(sizes)
        ]
        for round_index in range(num_rounds):
            for bucket, each in enumerate(sums):
                each.free()
                each.data.copy_(given(replica, round_index, bucket))
                each.start()
                if draw.random() < 0.3:
                    threading.Event().wait(0.001 * draw.random())
            for each in sums:
                each.go_on()
            for bucket, each in enumerate(sums):
                each.wait()
                expected = sum(given(other, round_index, bucket).double() for other in range(count))
                assert isinstance(expected, torch.Tensor)
                assert torch.equal(each.data.double(), expected)

    together([lambda replica=replica: work(replica) for replica in range(count)])  # type: ignore[misc]
    for each in shares:
        each.close()


def test_two_replicas_sums_have_the_same_bits_in_any_order() -> None:
    """Two processes have the virtual engine's sums."""
    torch.manual_seed(1)
    own = [torch.randn(10_001), torch.randn(10_001)]
    shares = replicas(2, aligned(40_004))
    found: dict[int, torch.Tensor] = {}

    def work(replica: int) -> None:
        each = SharedSum(10_001, torch.float32, shares[replica], 0, 1)
        each.data.copy_(own[replica])
        each.start()
        each.go_on()
        each.wait()
        found[replica] = each.data.clone()

    together([lambda: work(0), lambda: work(1)])
    assert torch.equal(found[0], own[0] + own[1])
    assert torch.equal(found[1], own[1] + own[0])
    for each in shares:
        each.close()


def test_a_bucket_is_refilled_only_after_all_have_read_it() -> None:
    first, second = replicas(2, aligned(64))
    fast, slow = (SharedSum(16, torch.float32, each, 0, 1) for each in (first, second))
    for each in (fast, slow):
        each.free()
        each.data.fill_(1.0)
        each.start()
    for each in (fast, slow):
        each.go_on()
    fast.wait()
    freed = threading.Event()

    def fill() -> None:
        fast.free()
        freed.set()

    thread = threading.Thread(target=fill)
    thread.start()
    assert not freed.wait(0.05)  # the slow one hasn't read what the fast one has added up
    slow.wait()
    assert freed.wait(PATIENCE_S)
    thread.join()
    assert torch.equal(slow.data, torch.full((16,), 2.0))
    first.close()
    second.close()


def test_a_lost_replica_is_reported() -> None:
    first, second = replicas(2, aligned(64))
    each = SharedSum(16, torch.float32, first, 0, 1)
    each.start()
    second.close()
    with pytest.raises(PeerLostError, match="lost a peer: the process at the other end of a pipe is gone"):
        each.go_on()
    first.close()


def test_a_reducer_sums_gradients_of_a_single_replica() -> None:
    """The other adds zeros; a parameter without a gradient on any replica has none."""
    like = [torch.zeros(shape, dtype=torch.float64) for shape in ((3, 2), (), (4,))]
    buckets = [[2], [1, 0]]
    shares = replicas(2, shared_bytes(buckets, like))
    found: dict[int, list[torch.Tensor | None]] = {}

    def work(replica: int) -> None:
        summing = Summing(None, host_copy=False, shared=shares[replica])
        reducer = Reducer(buckets, like, summing, HostTimer(0, lambda: 0.0, print))
        reducer.connect()
        for _ in range(3):
            if replica == 0:
                reducer.add(2, torch.full((4,), 3.0, dtype=torch.float64))
            reducer.finish([torch.full((3, 2), replica + 1.0, dtype=torch.float64), None, None])
            found[replica] = [g if g is None else g.clone() for g in reducer.wait(lambda *_: None)]

    together([lambda: work(0), lambda: work(1)])
    for first, second, third in found.values():
        assert second is None
        assert first is not None
        assert third is not None
        assert torch.equal(first, torch.full((3, 2), 3.0, dtype=torch.float64))
        assert torch.equal(third, torch.full((4,), 3.0, dtype=torch.float64))
    for each in shares:
        each.close()
