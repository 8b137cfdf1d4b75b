"""A lock on a run's folder: one command trains a run at a time.

The lock is `flock`'s on the file `lock` in the folder. The system frees it with the process that holds it, however that
ends, so that the file itself says nothing. The filelock package isn't used here: its older versions take a file system
without locks for one where somebody holds the lock, and empty the file that says who.
"""

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipebench.errors import UserError, printable

_NAME = "lock"
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_POLL_S = 0.2
TRAINS, CLOSES = "trains it", "closes its record"  # what a holder does with the run
_CLOSING_S = 120.0  # that is waited for who closes a record: MLflow's import takes long on a busy machine
_LONGEST = 120  # characters of what the holder says of itself
_held: dict[Path, int] = {}  # file descriptors, by folder


@contextmanager
def locked(folder: Path, *, patience_s: float = 0.0, doing: str = TRAINS) -> Iterator[None]:
    """Hold a run's folder; what this process holds already it may hold again.

    Who closes the record of a run that was ended is waited for: that takes seconds.

    Args:
        folder: the run's.
        patience_s: how long to wait for another process to let go.
        doing: what this process does with the run, for others.

    Raises:
        UserError: another process holds it, or its file can't be written.
    """
    folder = folder.resolve()
    if folder in _held:
        yield
        return
    path = folder / _NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{path}: can't be opened to lock the run: {error.strerror}") from error
    try:
        _lock(descriptor, path, patience_s, doing)
        _held[folder] = descriptor
        yield
    finally:
        _held.pop(folder, None)
        os.close(descriptor)


def _lock(descriptor: int, path: Path, patience_s: float, doing: str) -> None:
    """Take the lock and say in its file who has it."""
    began_s = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                problem = (
                    f"{path}: the file system has no locks ({error.strerror}): take care not to resume the run twice"
                )
                print(f"pipebench: {printable(problem)}", file=sys.stderr, flush=True)
                return
            if error.errno not in _TAKEN:
                raise UserError(f"{path}: can't be locked: {error.strerror}") from error
            holder = os.pread(descriptor, _LONGEST, 0).decode(errors="replace") or f"another process {TRAINS}"
            limit_s = max(patience_s, _CLOSING_S) if holder.endswith(CLOSES) else patience_s
            if time.monotonic() - began_s >= limit_s:
                raise UserError(
                    f"run {path.parent.name} is running: {holder}; wait until it ends, or stop it"
                ) from None
            time.sleep(_POLL_S)
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} {doing}".encode(), 0)
            return


def _let_go_in_child() -> None:
    """Close in a forked process what its parent holds: a loader's process may outlive that for seconds."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
