"""Ring all-reduce among the replicas of a stage, carried out chunk by chunk in one process."""

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
