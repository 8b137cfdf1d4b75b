"""A lock on a run's folder: one command trains a run at a time.

`flock` on the file `lock` in the folder; the system releases it when the holder ends, so the file's content doesn't
matter. Not the filelock package: older versions treat a file system without locks as locked, and empty the file that
names the holder.
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
TRAINS, CLOSES = "trains it", "closes its record"  # a holder's activity
_CLOSING_S = 120.0  # patience while a record is closed: importing MLflow is slow on a busy machine
_LONGEST = 120  # characters of a holder's description
_held: dict[Path, int] = {}  # file descriptors, by folder


@contextmanager
def locked(folder: Path, *, patience_s: float = 0.0, doing: str = TRAINS) -> Iterator[None]:
    """Hold a run's folder; reentrant within a process. Waits while another process closes the run's record.

    `patience_s` is the longest wait for another process, `doing` the activity shown to others.

    Raises:
        UserError: another process holds it, or the file isn't writable.
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
    """Take the lock and name the holder in its file."""
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
    """Close inherited locks in a forked process: a data loader's may outlive its parent for seconds."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
