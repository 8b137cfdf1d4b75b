"""Bytes that the members of a group send each other to sum a buffer, in a ring or by servers."""

from collections.abc import Iterator, Sequence

from pipebench.schedule.syncs import ALL_REDUCE


def ring_bytes(num_bytes: int, size: int) -> list[int]:
    """Return the bytes that each member of a ring all-reduce sends; 2 (size - 1) num_bytes in all.

    The buffer is cut into `size` chunks as evenly as 4-byte elements allow. Member i passes on every chunk but i+1
    while summing, and every chunk but i+2 while distributing.
    """
    chunks = _chunks(num_bytes, size)
    return [2 * num_bytes - chunks[(i + 1) % size] - chunks[(i + 2) % size] for i in range(size)]


def traffic(sync: str, num_bytes: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (sender, receiver, bytes) of a group that sums a buffer.

    In a ring each member sends to the next. With servers each sends every other member its share, and all the sum of
    its own: 2 (m-1) |w| / m sent and received per member (the 2018 preprint counts both, 4 (m-1) |w| / m).
    """
    if sync == ALL_REDUCE:
        yield from ((i, (i + 1) % size, sent) for i, sent in enumerate(ring_bytes(num_bytes, size)))
        return
    chunks = _chunks(num_bytes, size)
    yield from ((i, j, chunks[j] + chunks[i]) for i in range(size) for j in range(size) if i != j)


def all_reduce_traffic(num_bytes: int, servers: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (sender, receiver, bytes) of an all-reduce over `servers`; 2 (r-1) num_bytes in all.

    Every server's members reduce and distribute in a ring of their own, and so do the servers among each other; the
    first members send for their servers. A single server of all members is a plain ring.
    """
    for ring in (*servers, [server[0] for server in servers]):
        if len(ring) > 1:
            yield from ((ring[i], ring[j], sent) for i, j, sent in traffic(ALL_REDUCE, num_bytes, len(ring)))


def _chunks(num_bytes: int, size: int) -> list[int]:
    elements, rest = divmod(num_bytes, 4)
    chunks = [4 * (elements // size + (i < elements % size)) for i in range(size)]
    chunks[0] += rest
    return chunks
