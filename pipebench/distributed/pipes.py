"""Pipes between two processes of one host, one each way, and access to each other's files.

Pipes have no names: each process makes those that it reads, and the other opens them by /proc. When a process ends its
pipes close, and the other notices. Linux only.
"""

import fcntl
import os
import resource
import select
from collections.abc import Sequence
from contextlib import suppress

from pipebench.distributed.launch_join import PeerLostError
from pipebench.distributed.world import World

_MANY = 1 << 16  # bytes that a pipe is read by
_PIPE_BYTES = 1 << 20  # the most that anybody may ask for
_GONE = "lost a peer: the process at the other end of a pipe is gone"


class PipePair:
    """One process's ends of two pipes.

    Args:
        peer: the other process.
        reads: file descriptor of the pipe from there.
        writes: of the pipe to there.
        limit_s: how long a wait may take before the peer counts as lost.
    """

    def __init__(self, peer: int, reads: int, writes: int, limit_s: float) -> None:
        self.peer = peer
        self._reads, self._writes = reads, writes
        self._limit_s = limit_s
        os.set_blocking(reads, False)
        self._poll = select.poll()
        self._poll.register(reads, select.POLLIN)

    def write(self, data: bytes) -> None:
        """Write; a pipe has room for many thousand messages.

        Raises:
            PeerLostError: the peer is gone; so for all methods.
        """
        try:
            while data:
                data = data[os.write(self._writes, data) :]
        except BrokenPipeError as error:
            raise PeerLostError(_GONE) from error

    def available(self, most: int = _MANY) -> bytes:
        """Return the bytes that have arrived, maybe none."""
        try:
            found = os.read(self._reads, most)
        except BlockingIOError:
            return b""
        if not found:
            raise PeerLostError(_GONE)
        return found

    def read_some(self, most: int = _MANY) -> bytes:
        """Wait for at least a byte."""
        while not (found := self.available(most)):
            if not self._poll.poll(1000 * self._limit_s):
                raise PeerLostError(f"lost a peer: nothing came within {self._limit_s:g} s")
        return found

    def read_exactly(self, num_bytes: int) -> bytes:
        """Wait for exactly so many bytes."""
        found = self.read_some(num_bytes)
        while len(found) < num_bytes:
            found += self.read_some(num_bytes - len(found))
        return found

    def open(self, file: int) -> int:
        """Open a file of the peer by its file descriptor there."""
        try:
            return _opened(self.peer, file, os.O_RDWR)
        except OSError as error:
            raise PeerLostError(f"lost a peer: process {self.peer} is gone ({error.strerror})") from error

    def close(self) -> None:
        """Close both pipes."""
        os.close(self._reads)
        os.close(self._writes)


def join_pairs(world: World, pairs: Sequence[tuple[int, int]]) -> dict[int, PipePair] | None:
    """Connect pairs of different ranks, possibly repeated, by pipes; all workers call it with the same pairs.

    Returns:
        By pair's index this worker's end, where it is in the pair; None, for all workers, if they aren't to share
        memory or the system doesn't allow it.

    Raises:
        PeerLostError: a worker is gone.
    """
    if not (
        world.shares_memory and world.place.one_host and world.device.type == "cpu" and hasattr(os, "memfd_create")
    ):
        return None
    _allow_files()
    own = {index: os.pipe() for index, pair in enumerate(pairs) if world.rank in pair}
    for _, writes in own.values():
        with suppress(OSError):  # where the system says no, it holds what it does
            fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    offers = world.exchange([os.getpid(), [[index, writes] for index, (_, writes) in own.items()]])
    others = {index: offers[sum(pairs[index]) - world.rank] for index in own}
    theirs: dict[int, int] = {}
    with suppress(OSError):
        for index, (process, files) in others.items():
            theirs[index] = _opened(process, dict(files)[index], os.O_WRONLY)
    joined = all(world.exchange(len(theirs) == len(own)))
    for _, writes in own.values():
        os.close(writes)  # the peer's is the only one then: when its process is gone, the pipe ends
    if not joined:
        for file in (*theirs.values(), *(reads for reads, _ in own.values())):
            os.close(file)
        return None
    return {
        index: PipePair(others[index][0], reads, theirs[index], world.operation_limit_s)
        for index, (reads, _) in own.items()
    }


def _allow_files() -> None:
    """Raise this process's limit of open files: Python keeps one open for every mapped slot."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _opened(process: int, file: int, mode: int) -> int:
    return os.open(f"/proc/{process}/fd/{file}", mode | os.O_CLOEXEC)
