"""A lock on a run's folder, so that one command trains the run at a time. The file `lock` says who holds it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from pipebench.errors import UserError, print_notice
from pipebench.files import NO_LOCKS, FileLock

_NAME = "lock"
_LONGEST = 120  # characters of a holder's description
_held: dict[Path, FileLock] = {}  # by folder
_print_once = cache(print_notice)


@contextmanager
def locked(folder: Path, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a run's folder; reentrant within a process.

    Args:
        folder: the run's.
        patience_s: seconds to wait if another process holds it.

    Raises:
        UserError: another process holds it, or the file isn't writable.
    """
    folder = folder.resolve()
    lock = None if folder in _held and _held[folder].is_held else _lock(folder / _NAME, patience_s)
    if lock is None:
        yield
        return
    _held[folder] = lock
    try:
        yield
    finally:
        del _held[folder]
        lock.release()


def _lock(path: Path, patience_s: float) -> FileLock | None:
    """Take the lock and name the holder in its file; None where there are no locks."""
    try:
        lock = FileLock(path, patience_s=patience_s)
    except BlockingIOError:
        holder = path.read_text(errors="replace")[:_LONGEST] or "another process trains it"
        raise UserError(f"run {path.parent.name} is running: {holder}; wait until it ends, or stop it") from None
    except OSError as error:
        if error.errno in NO_LOCKS:
            _print_once(f"{path}: the file system has no locks ({error.strerror}): take care not to resume twice")
            return None
        raise UserError(f"{path}: can't be locked: {error.strerror}") from error
    path.write_text(f"process {os.getpid()} on {socket.gethostname()} trains it")
    return lock
