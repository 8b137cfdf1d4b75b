"""Sums among the replicas of a stage, in a ring or by servers, carried out chunk by chunk in one process."""

from collections.abc import Callable, Sequence

import torch

Count = Callable[[int, int, int], None]  # sender index, receiver index, bytes


def ring_all_reduce(buffers: Sequence[torch.Tensor], count: Count) -> torch.Tensor:
    """Return the sum of one-dimensional buffers, added in the order a ring adds.

    Chunk c starts at member c and collects a summand at every step; its sum is then handed round. With two members
    the order can't matter, so the result has the same bits as any other all-reduce.

    Args:
        buffers: one per member, all of one size; not changed.
        count: told of every chunk handed from one member to the next.
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


def all_reduce(buffers: Sequence[torch.Tensor], servers: Sequence[Sequence[int]], count: Count) -> torch.Tensor:
    """Return the sum of one-dimensional buffers: every server's in a ring inside it, and theirs in a ring among them.

    Args:
        buffers: one per member, all of one size; not changed.
        servers: the members of every server; one of all members is the ring.
        count: told of every chunk handed from one member to the next.
    """

    def told(ring: Sequence[int]) -> Count:
        return lambda sender, receiver, num_bytes: count(ring[sender], ring[receiver], num_bytes)

    sums = [ring_all_reduce([buffers[member] for member in server], told(server)) for server in servers]
    return ring_all_reduce(sums, told([server[0] for server in servers]))


def server_sum(buffers: Sequence[torch.Tensor], count: Count) -> torch.Tensor:
    """Return the sum of one-dimensional buffers, added in the order of the members.

    Member c is the server of chunk c: all others send it theirs, and get the sum. Paper: PipeDream's preprint of 2018.

    Differs: a server hands back sums, and every replica updates its own weights with them; in the paper it updates, and
    hands back weights. The bytes are the same, and so are the weights.

    Args:
        buffers: one per member, all of one size; not changed.
        count: told of every chunk that one member sends another.
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
    """Split a bucket into one per type of its parameters, in order: numbers of one type travel together.

    Args:
        bucket: positions of parameters.
        like: all parameters.
    """
    by_type: dict[torch.dtype, list[int]] = {}
    for index in bucket:
        by_type.setdefault(like[index].dtype, []).append(index)
    return list(by_type.values())
