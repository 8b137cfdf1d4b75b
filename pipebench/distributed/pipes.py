"""Pipes between two processes of one host, one each way, and access to each other's files.

Pipes have no names: each process makes the pipes that it reads, and the other process opens them by /proc. A process's
ends close when it ends, which the other process notices. Linux only.
"""

import fcntl
import os
import select
from collections.abc import Sequence
from contextlib import suppress

from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.world import World

_READ_BYTES = 1 << 16  # at most, of one read
_PIPE_BYTES = 1 << 20  # the most that an unprivileged process may set
_GONE = "lost a peer: the process at the other end of a pipe is gone"


class PipePair:
    """One process's ends of the pipes from and to a peer. All methods raise `PeerLostError` if the peer is gone.

    Args:
        peer: the peer's process id.
        reads: file descriptor of the end to read from.
        writes: file descriptor of the end to write to.
        limit_s: a peer that sends nothing for so many seconds, while this process waits for it, counts as lost.
    """

    def __init__(self, peer: int, reads: int, writes: int, limit_s: float) -> None:
        self.peer = peer
        self._reads, self._writes = reads, writes
        self._limit_s = limit_s
        os.set_blocking(reads, False)
        self._poll = select.poll()
        self._poll.register(reads, select.POLLIN)

    def write(self, data: bytes) -> None:
        """Write bytes. This blocks only if the pipe is full; it has room for many thousand messages."""
        try:
            while data:
                data = data[os.write(self._writes, data) :]
        except BrokenPipeError as error:
            raise PeerLostError(_GONE) from error

    def available(self, most: int = _READ_BYTES) -> bytes:
        """Return bytes that have arrived, perhaps none and at most `most`."""
        try:
            found = os.read(self._reads, most)
        except BlockingIOError:
            return b""
        if not found:
            raise PeerLostError(_GONE)
        return found

    def read_some(self, most: int = _READ_BYTES) -> bytes:
        """Wait for at least one byte and return what has arrived, at most `most` bytes."""
        while not (found := self.available(most)):
            if not self._poll.poll(1000 * self._limit_s):
                raise PeerLostError(f"lost a peer: nothing came within {self._limit_s:g} s")
        return found

    def read_exactly(self, num_bytes: int) -> bytes:
        """Wait for `num_bytes` bytes and return them."""
        found = self.read_some(num_bytes)
        while len(found) < num_bytes:
            found += self.read_some(num_bytes - len(found))
        return found

    def open(self, file: int) -> int:
        """Open a file of the peer's, given by its file descriptor there; return the one here."""
        try:
            return _opened(self.peer, file, os.O_RDWR)
        except OSError as error:
            raise PeerLostError(f"lost a peer: process {self.peer} is gone ({error.strerror})") from error

    def close(self) -> None:
        """Close both pipes."""
        os.close(self._reads)
        os.close(self._writes)


def join_pairs(world: World, pairs: Sequence[tuple[int, int]]) -> dict[int, PipePair] | None:
    """Connect pairs of workers by pipes; all workers call it with the same pairs.

    Args:
        world: the workers.
        pairs: two different ranks each; a pair may occur several times.

    Returns:
        This worker's ends, by the pair's index; None on all workers if they aren't to share memory or the system
        forbids it.
    """
    if not (
        world.shares_memory and world.place.one_host and world.device.type == "cpu" and hasattr(os, "memfd_create")
    ):
        return None
    own = {index: os.pipe() for index, pair in enumerate(pairs) if world.rank in pair}
    for _, writes in own.values():
        with suppress(OSError):  # a refused size leaves the default
            fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    offers = world.exchange([os.getpid(), [[index, writes] for index, (_, writes) in own.items()]])
    others = {index: offers[sum(pairs[index]) - world.rank] for index in own}
    theirs: dict[int, int] = {}
    with suppress(OSError):
        for index, (process, files) in others.items():
            theirs[index] = _opened(process, dict(files)[index], os.O_WRONLY)
    joined = all(world.exchange(len(theirs) == len(own)))
    for _, writes in own.values():
        os.close(writes)  # now only the peer has this end, so that the pipe closes when the peer ends
    if not joined:
        for file in (*theirs.values(), *(reads for reads, _ in own.values())):
            os.close(file)
        return None
    return {
        index: PipePair(others[index][0], reads, theirs[index], world.operation_limit_s)
        for index, (reads, _) in own.items()
    }


def _opened(process: int, file: int, mode: int) -> int:
    return os.open(f"/proc/{process}/fd/{file}", mode | os.O_CLOEXEC)
