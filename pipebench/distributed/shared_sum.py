"""Sums over replicas of one host, in files in memory that all of them read.

A bucket's numbers are in the replica's own file, and the others are notified when it is full. Once all are full, each
replica adds up one chunk, reading the others' piece by piece, and notifies them; then each reads the others' chunks
into its own file. It does this while it waits for the sum. A bucket may be filled again once all others have read it,
which they also report; a backward lies between, so this hardly ever waits.

It can't deadlock. A replica that waits here needs the others to reach their wait for the same round. Between its last
backward of a round and that wait a worker blocks only for what a flush's other stages and microbatches still exchange;
and in a flush a worker waits for its first sum after all of its passes.
"""

import os
from collections.abc import Sequence

import torch

from pipebench.distributed.pipes import PipePair, join_pairs
from pipebench.distributed.shared_memory import bytes_of, mapped, new_file
from pipebench.distributed.world import World

FULL, _ADDED, _READ = b"fad"  # notifications on the next bucket; all replicas take buckets in one order
PLACE_BYTES = 1 << 40  # from one place in a file to the other: more than tensors have; the hole takes no memory
_PIECE_BYTES = 1 << 18  # read and added at once: fits a core's own cache
_ALIGNED_BYTES = 64


class SharedFile:
    """One replica's file of `num_bytes` for all buckets, and its pipes to the others, by their positions."""

    def __init__(self, own: int, lines: dict[int, PipePair], num_bytes: int) -> None:
        self.own, self.lines = own, lines
        self.num_full = 0  # calls of `full`
        self.file, size = new_file(num_bytes)
        self.files: dict[int, int] = {}
        self.piece = torch.empty(_PIECE_BYTES, dtype=torch.uint8)
        self._bytes = mapped(self.file, size)
        self._end = 0
        self._heard = {(position, what): 0 for position in lines for what in (FULL, _ADDED, _READ)}

    def room(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Return a tensor of `count` numbers in the file, and its start."""
        start = self.take(count * dtype.itemsize)
        return self._bytes[start : start + count * dtype.itemsize].view(dtype), start

    def take(self, num_bytes: int) -> int:
        """Return the start of the next so many bytes of the file."""
        start = self._end
        self._end += room_bytes(num_bytes)
        return start

    def tell(self, what: int) -> None:
        """Notify all others."""
        for line in self.lines.values():
            line.write(bytes([what]))

    def full(self) -> int:
        """Notify all others that the next values are written; return how many times this has been."""
        self.num_full += 1
        self.tell(FULL)
        return self.num_full

    def hear(self, position: int, what: int, times: int) -> None:
        """Wait until another replica has sent a notification `times` times."""
        while self._heard[position, what] < times:
            for byte in self.lines[position].read_some():
                self._heard[position, byte] += 1

    def close(self) -> None:
        """Close pipes and files."""
        for line in self.lines.values():
            line.close()
        for file in (self.file, *self.files.values()):
            os.close(file)


class SharedSum:
    """Sums one bucket of `count` numbers, number `position` of `buckets`; used like `reducer.RingSum`."""

    def __init__(self, count: int, dtype: torch.dtype, shared: SharedFile, position: int, buckets: int) -> None:
        self.data, start = shared.room(count, dtype)
        self._shared = shared
        self._position, self._buckets = position, buckets
        self._round = 0
        size = len(shared.lines) + 1
        self._chunks = self.data.tensor_split(size)
        starts = [start + sum(chunk.nbytes for chunk in self._chunks[:index]) for index in range(size)]
        self._starts = starts
        step = _PIECE_BYTES // dtype.itemsize
        own = self._chunks[shared.own]
        scratch = shared.piece.view(dtype)
        # Per piece of the own chunk: the piece, the buffer for the others', and its start in their files.
        self._pieces = [
            (piece, scratch[: len(piece)], bytes_of(scratch[: len(piece)]), starts[shared.own] + index * _PIECE_BYTES)
            for index, piece in enumerate(torch.split(own, step))
            if len(piece)
        ]

    def free(self) -> None:
        """Wait until the others have read the bucket."""
        for position in self._shared.lines:
            self._shared.hear(position, _READ, self._count(self._round - 1))

    def start(self) -> None:
        """Notify the others that the bucket is full."""
        self._shared.tell(FULL)

    def go_on(self) -> None:
        """Add up the own chunk."""
        shared, count = self._shared, self._count(self._round)
        for position, file in shared.files.items():
            shared.hear(position, FULL, count)
            for piece, scratch, taken, start in self._pieces:
                read(file, taken, start)
                piece.add_(scratch)
        shared.tell(_ADDED)

    def wait(self) -> None:
        """Read the other chunks."""
        shared, count = self._shared, self._count(self._round)
        for position, file in shared.files.items():
            shared.hear(position, _ADDED, count)
            read(file, bytes_of(self._chunks[position]), self._starts[position])
        shared.tell(_READ)
        self._round += 1

    def _count(self, round_index: int) -> int:
        """Return the number of notifications up to this bucket of a round."""
        return round_index * self._buckets + self._position + 1 if round_index >= 0 else 0


def share(world: World, ranks: Sequence[int], num_bytes: int) -> SharedFile | None:
    """Share files among replicas, given by rank in their order; all workers call it, those of other stages too.

    Returns this replica's; None for other workers, and for all where processes can't share memory. `num_bytes` is the
    aligned size of a replica's buckets.
    """
    pairs = [(a, b) for position, a in enumerate(ranks) for b in ranks[position + 1 :]]
    lines = join_pairs(world, pairs)
    if lines is None:
        return None
    by_position = {ranks.index(sum(pairs[index]) - world.rank): line for index, line in lines.items()}
    own = SharedFile(ranks.index(world.rank), by_position, num_bytes) if world.rank in ranks else None
    files = world.exchange(None if own is None else own.file)
    if own is not None:
        own.files = {position: line.open(files[ranks[position]]) for position, line in by_position.items()}
    world.barrier()  # files must stay open until all have opened them
    return own


def room_bytes(num_bytes: int) -> int:
    """Return the aligned size of a bucket in a file."""
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def read(file: int, into: memoryview, start: int) -> None:
    """Read from a file in memory, at most two gigabytes at once."""
    while into:
        found = os.preadv(file, [into], start)
        assert found, f"nothing at {start}"
        into, start = into[found:], start + found
