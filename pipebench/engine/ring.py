"""Sums over the replicas of a stage, in a ring or by servers: in one process, chunk by chunk as between processes."""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from pipebench.schedule.syncs import ALL_REDUCE, ALL_TO_ALL, PARAMETER_SERVER, RING

Count = Callable[[int, int, int], None]  # called with a chunk's sender and receiver, positions in the ring, and bytes
Groups = Sequence[Sequence[int]]  # the members on every server, see `Cluster.servers`


def ring_all_reduce(buffers: Sequence[torch.Tensor], count: Count) -> torch.Tensor:
    """Return the sum of one-dimensional buffers of one size, in a ring's order of addition.

    Chunk c starts at member c, and each next member adds its own; then the sum is passed round. With two members the
    order does not matter, so the result has the same bits as any other all-reduce.
    """
    size = len(buffers)
    if size == 1:
        return buffers[0]
    chunks = [buffer.tensor_split(size) for buffer in buffers]
    total = torch.empty_like(buffers[0])
    for c, out in enumerate(total.tensor_split(size)):
        travelling = chunks[c][c]
        for step in range(1, size):
            member = (c + step) % size
            count((member - 1) % size, member, travelling.nbytes)
            travelling = torch.add(travelling, chunks[member][c], out=out)
        for step in range(size - 1):
            member = (c - 1 + step) % size
            count(member, (member + 1) % size, out.nbytes)
    return total


def all_reduce(buffers: Sequence[torch.Tensor], servers: Groups, count: Count) -> torch.Tensor:
    """Return the sum of one-dimensional buffers of one size: in a ring inside every server, then in a ring of servers.

    With a single server this is `ring_all_reduce`.
    """

    def counter_of(ring: Sequence[int]) -> Count:
        return lambda sender, receiver, num_bytes: count(ring[sender], ring[receiver], num_bytes)

    sums = [ring_all_reduce([buffers[member] for member in server], counter_of(server)) for server in servers]
    return ring_all_reduce(sums, counter_of([server[0] for server in servers]))


def server_sum(buffers: Sequence[torch.Tensor], count: Count) -> torch.Tensor:
    """Return the sum of one-dimensional buffers of one size, added in the order of the members.

    Member c is the server of chunk c: all others send it theirs and receive the sum. Paper: PipeDream's preprint of
    2018. Differs: servers return sums and every replica updates its own weights; in the paper they update and return
    weights. Bytes and weights are the same.
    """
    size = len(buffers)
    chunks = [buffer.tensor_split(size) for buffer in buffers]
    total = torch.empty_like(buffers[0])
    for server, out in enumerate(total.tensor_split(size)):
        out.copy_(chunks[0][server])
        for member in range(1, size):
            out += chunks[member][server]
        for other in range(size):
            if other != server:
                count(other, server, out.nbytes)
                count(server, other, out.nbytes)
    return total


def of_one_type(bucket: Sequence[int], like: Sequence[torch.Tensor]) -> list[list[int]]:
    """Split a bucket, positions in the parameters `like`, into one per dtype: a message has one dtype."""
    by_type: dict[torch.dtype, list[int]] = {}
    for index in bucket:
        by_type.setdefault(like[index].dtype, []).append(index)
    return list(by_type.values())


def _not_counted(sender: int, receiver: int, num_bytes: int) -> None:
    """Count nothing."""


# Sums by the `algorithm` of a `syncs.Sync`; `simulate/sums.py` says what each sends, and when.
SUMS: Final[dict[str, Callable[[Sequence[torch.Tensor], Groups, Count], torch.Tensor]]] = {
    ALL_REDUCE: all_reduce,
    PARAMETER_SERVER: lambda buffers, _, count: server_sum(buffers, count),
    # Of sharded replicas: sums are scattered, not sent to all, and `InProcessCollectives` counts their bytes.
    RING: lambda buffers, servers, _: all_reduce(buffers, servers, _not_counted),
    ALL_TO_ALL: lambda buffers, _, __: server_sum(buffers, _not_counted),
}
