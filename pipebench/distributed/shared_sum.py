"""Sums over replicas of one host, in files in memory that all of them read.

A replica's bucket is in its own file, and it notifies the others when the bucket is full. Once all are full, each
replica adds up one chunk, reading the others' files piece by piece, and notifies them. Then each reads the others'
chunks into its own file. A replica does this while it waits for the sum. A bucket may be filled again once all others
have read it, which they report, too. A backward lies between, so a replica hardly ever waits for that.

It can't deadlock. A replica that waits here needs the others to reach their wait for the same round. Between its last
backward of a round and that wait, a worker blocks only for messages between a flush's other stages and microbatches. In
a flush a worker waits for its first sum after all of its passes.
"""

import os
from collections.abc import Sequence
from itertools import combinations

import torch

from pipebench.distributed.message import aligned
from pipebench.distributed.pipes import PipePair, join_pairs
from pipebench.distributed.shared_memory import bytes_of, mapped, new_file
from pipebench.distributed.world import World

FULL, _ADDED, _READ = b"fad"  # notifications about the next bucket; all replicas take buckets in the same order
# Distance of two places in a file that are used in turn: more bytes than any tensor has. The hole takes no memory.
PLACE_BYTES = 1 << 40
_PIECE_BYTES = 1 << 18  # read and added at once: fits a core's own cache


class SharedFile:
    """One replica's file for all buckets, and its pipes to the others.

    Args:
        own: this replica's position among those that share.
        lines: pipes to the others, by position.
        num_bytes: size of the file.
    """

    def __init__(self, own: int, lines: dict[int, PipePair], num_bytes: int) -> None:
        self.own, self.lines = own, lines
        self.num_full = 0  # calls of `full`
        self.file, size = new_file(num_bytes)
        self.files: dict[int, int] = {}  # file descriptors of the others' files, by position
        self.piece = torch.empty(_PIECE_BYTES, dtype=torch.uint8)
        self._bytes = mapped(self.file, size)
        self._end = 0  # of the part in use
        # Number of notifications, by the sender's position and their kind
        self._heard = {(position, what): 0 for position in lines for what in (FULL, _ADDED, _READ)}

    def room(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Return a tensor of `count` numbers in the file, and its start."""
        start = self.take(count * dtype.itemsize)
        return self._bytes[start : start + count * dtype.itemsize].view(dtype), start

    def take(self, num_bytes: int) -> int:
        """Reserve the next `num_bytes` bytes of the file; return their start."""
        start = self._end
        self._end += aligned(num_bytes)
        return start

    def notify(self, what: int) -> None:
        """Notify all others."""
        for line in self.lines.values():
            line.write(bytes([what]))

    def full(self) -> int:
        """Notify all others that the next values are written; return the number of calls so far."""
        self.num_full += 1
        self.notify(FULL)
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
    """Sums one bucket; used like `reducer.RingSum`.

    Args:
        count: numbers in the bucket.
        dtype: their type.
        shared: the replica's file.
        position: index of the bucket.
        num_buckets: number of buckets of a round.
    """

    def __init__(self, count: int, dtype: torch.dtype, shared: SharedFile, position: int, num_buckets: int) -> None:
        self.data, start = shared.room(count, dtype)
        self._shared = shared
        self._position, self._num_buckets = position, num_buckets
        self._round = 0
        size = len(shared.lines) + 1
        self._chunks = self.data.tensor_split(size)  # by the position of the replica that adds it up
        self._starts = [start + sum(chunk.nbytes for chunk in self._chunks[:index]) for index in range(size)]
        own, own_start = self._chunks[shared.own], self._starts[shared.own]
        scratch = shared.piece.view(dtype)
        # Per piece of this replica's chunk: the piece, a buffer for another replica's, that buffer's bytes, and the
        # start of the piece in all files.
        self._pieces = [
            (piece, scratch[: len(piece)], bytes_of(scratch[: len(piece)]), own_start + index * _PIECE_BYTES)
            for index, piece in enumerate(torch.split(own, _PIECE_BYTES // dtype.itemsize))
            if len(piece)
        ]

    def free(self) -> None:
        """Wait until the others have read the bucket."""
        for position in self._shared.lines:
            self._shared.hear(position, _READ, self._count(self._round - 1))

    def start(self) -> None:
        """Notify the others that the bucket is full."""
        self._shared.notify(FULL)

    def go_on(self) -> None:
        """Add up this replica's chunk."""
        shared, count = self._shared, self._count(self._round)
        for position, file in shared.files.items():
            shared.hear(position, FULL, count)
            for piece, scratch, scratch_bytes, start in self._pieces:
                read(file, scratch_bytes, start)
                piece.add_(scratch)
        shared.notify(_ADDED)

    def wait(self) -> None:
        """Read the other chunks."""
        shared, count = self._shared, self._count(self._round)
        for position, file in shared.files.items():
            shared.hear(position, _ADDED, count)
            read(file, bytes_of(self._chunks[position]), self._starts[position])
        shared.notify(_READ)
        self._round += 1

    def _count(self, round_index: int) -> int:
        """Return the number of notifications of a kind up to this bucket of a round; 0 before the first round."""
        return round_index * self._num_buckets + self._position + 1 if round_index >= 0 else 0


def share(world: World, ranks: Sequence[int], num_bytes: int) -> SharedFile | None:
    """Share files in memory among some workers; all workers call it, the others, too.

    Args:
        world: all workers.
        ranks: the workers that share, in their order.
        num_bytes: aligned size of a replica's buckets.

    Returns:
        This worker's file; None on workers that don't share, and on all if processes can't share memory.
    """
    pairs = list(combinations(ranks, 2))
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


def read(file: int, into: memoryview, start: int) -> None:
    """Read from a file in memory, at most two gigabytes at once."""
    while into:
        found = os.preadv(file, [into], start)
        assert found, f"the file ends at {start}"
        into, start = into[found:], start + found
