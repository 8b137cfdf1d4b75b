"""What the members of a group send each other when they sum a buffer: bytes by formula, in a ring or by servers."""

from collections.abc import Iterator, Sequence

from pipebench.schedule.syncs import ALL_REDUCE


def ring_bytes(num_bytes: int, size: int) -> list[int]:
    """Return what each member of a ring all-reduce sends, in bytes; together exactly 2 (size - 1) num_bytes.

    The buffer is cut into `size` chunks as evenly as 4-byte elements allow. Member i passes on every chunk but chunk
    i+1 while sums are formed, and every chunk but chunk i+2 while they are handed round.
    """
    chunks = _chunks(num_bytes, size)
    return [2 * num_bytes - chunks[(i + 1) % size] - chunks[(i + 2) % size] for i in range(size)]


def traffic(sync: str, num_bytes: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield what the members of a group send each other when they sum a buffer: sender, receiver, bytes.

    In a ring each sends to the next. With servers each sends every other its share, and everybody the sum of its own:
    every member sends 2 (m-1) |w| / m and receives as much (the 2018 preprint counts both, 4 (m-1) |w| / m).
    """
    if sync == ALL_REDUCE:
        yield from ((i, (i + 1) % size, sent) for i, sent in enumerate(ring_bytes(num_bytes, size)))
        return
    chunks = _chunks(num_bytes, size)
    yield from ((i, j, chunks[j] + chunks[i]) for i in range(size) for j in range(size) if i != j)


def all_reduce_traffic(num_bytes: int, servers: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield what the members of an all-reduce send each other: sender, receiver, bytes; 2 (r-1) num_bytes in all.

    Every server's members form its sum in a ring and hand out the whole's, as in an all-reduce of their own; so do the
    servers among each other. What they send there is booked with their first members.

    Args:
        num_bytes: size of the buffer.
        servers: the members of every server; one of all members is the ring.
    """
    for ring in (*servers, [server[0] for server in servers]):
        if len(ring) > 1:
            yield from ((ring[i], ring[j], sent) for i, j, sent in traffic(ALL_REDUCE, num_bytes, len(ring)))


def _chunks(num_bytes: int, size: int) -> list[int]:
    elements, rest = divmod(num_bytes, 4)
    chunks = [4 * (elements // size + (i < elements % size)) for i in range(size)]
    chunks[0] += rest
    return chunks
