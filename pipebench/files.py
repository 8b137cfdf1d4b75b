"""Files: written atomically (beside, flushed to disk, renamed); read only if regular and of limited size; locked."""

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from pipebench.errors import Fault, RecipeError, nearest

# Limit on files that users name: ten times the profile of 10,000 layers at three sizes.
MAX_FILE_BYTES = 100_000_000
ASIDE = ".tmp"  # suffix of a file that isn't complete, or not yet renamed


class FileError(RecipeError):
    """A file named by a recipe or on the command line that can't be read; `problem` ends a sentence."""

    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        self.problem = problem
        super().__init__([Fault(os.fspath(path), "", problem)])


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file; all files that users name are read by this.

    Only regular files are read: reading from a pipe or device may never end.

    Raises:
        FileError: it isn't a regular file, is larger than `max_bytes`, or can't be read; if missing, suggests a similar
            name. Its cause is the OSError, if any.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a writer blocks.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise FileError(path, "isn't a file")
            if found.st_size > max_bytes:
                raise FileError(path, f"is larger than {max_bytes} bytes")
            return file.read()
    except FileError:
        raise
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        reason = getattr(error, "strerror", None) or str(error)
        close = _similar(Path(path)) if isinstance(error, FileNotFoundError) else ""
        raise FileError(path, f"can't be read: {reason}{close}") from error


def start_of(path: Path, num_bytes: int) -> bytes:
    """Return the first bytes of a file, by which its kind is known; none if it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError:
        return b""


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a file in UTF-8, without byte order mark; see `read_bytes`.

    Raises:
        FileError: it can't be read, or isn't text.
    """
    try:
        return read_bytes(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(path, f"is not text in UTF-8 (byte {error.start})") from error


def folder_problem(folder: Path) -> str | None:
    """Return why no file can be created in a folder, or in its nearest existing parent, as a sentence's end, or None.

    Tries to create one: permissions don't show that a disk is read-only, and don't apply to the superuser.
    """
    folder = folder.absolute()
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not os.path.isdir(there):
        return f"{there} is a file"
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"{there} can't be written to: {error.strerror}"


def _similar(path: Path) -> str:
    """Return `; did you mean X?` for the file beside it whose name is closest."""
    return nearest(path.name, (each.name for each in path.parent.glob(f"*{path.suffix}") if each.is_file()))


class HashingWriter:
    """A file for `torch.save`: counts and hashes what is written.

    Failed writes are raised by `finish`, not `write`: torch's zip writer would replace them by a RuntimeError about
    positions in the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._failure: OSError | None = None
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Write bytes; return their number."""
        count = memoryview(data).nbytes
        if self._failure is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._failure = error
            self._hash.update(data)
            self.num_bytes += count
        return count

    def flush(self) -> None:
        """Do nothing: `finish` flushes."""

    def finish(self) -> str:
        """Flush to the disk; return the SHA-256 of what was written; raises an OSError if something couldn't be."""
        if self._failure is not None:
            raise self._failure
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Aside:
    """A complete file that isn't renamed to its target yet."""

    path: Path  # in the target's folder
    sha256: str  # hexadecimal
    num_bytes: int


def write_aside(path: Path, fill: Callable[[HashingWriter], object]) -> Aside:
    """Write a file beside its target, for the caller to rename. Concurrent writers get names of their own.

    Raises:
        OSError: it can't be written, e.g. on a full disk; nothing is left behind.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{ASIDE}")
    try:
        with open(beside, "wb") as file:
            writer = HashingWriter(file)
            fill(writer)
            return Aside(beside, writer.finish(), writer.num_bytes)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def replace(path: Path, content: bytes | Callable[[HashingWriter], object]) -> None:
    """Replace a file's content atomically: readers, and a crash, see the old or the new content.

    `content` are bytes or a function that writes them. The file need not exist, its folder must.

    Raises:
        OSError: it can't be written; the old content stays.
    """
    written = write_aside(path, content if callable(content) else lambda writer: writer.write(content))
    try:
        rename(written.path, path)
    except BaseException:
        written.path.unlink(missing_ok=True)
        raise


def rename(source: Path, target: Path) -> None:
    """Rename a file, and flush the new name to the disk."""
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to the disk, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_POLL_S = 0.05  # between two tries to lock a file
# Errors of file systems without locks; the last two are the same number on Linux, but not on macOS.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


class FileLock:
    """An advisory lock on a file, created if missing, until `release`, the end of a context or of this process.

    A forked process doesn't inherit it. The filelock package won't do: its older versions treat a file system without
    locks as locked, and empty the file.

    Args:
        path: the file.
        shared: allow other processes to hold it at the same time, if they share it, too.
        patience_s: seconds to wait if another process holds it.

    Raises:
        OSError: the file can't be created or locked; EWOULDBLOCK: another process still holds the lock.
    """

    def __init__(self, path: Path, *, shared: bool = False, patience_s: float = 0.0) -> None:
        until_s = time.monotonic() + patience_s
        while (descriptor := _locked(path, shared=shared, or_none=time.monotonic() < until_s)) is None:
            time.sleep(_POLL_S)
        self._descriptor: int | None = descriptor
        _locks.add(self)

    def __enter__(self) -> Self:
        """Return the lock."""
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        self.release()

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._descriptor is not None

    def release(self) -> None:
        """Release the lock, if it is held."""
        descriptor, self._descriptor = self._descriptor, None  # a closed descriptor's number may become another file's
        _locks.discard(self)
        if descriptor is not None:
            os.close(descriptor)


def _locked(path: Path, *, shared: bool, or_none: bool) -> int | None:
    """Open and lock a file; with `or_none`, return None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if or_none and isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


_locks: set[FileLock] = set()


def _release_in_child() -> None:
    """Close inherited locks in a forked process, which may outlive its parent, as a data loader's does."""
    for lock in [*_locks]:
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def reopen_inherited() -> None:
    """Open anew every regular file that this forked process has inherited for reading, at the same place.

    Processes that share an open file share the place in it: where one has sought, another reads. Linux only; elsewhere,
    files aren't inherited by the processes that this is for.
    """
    with suppress(OSError):  # no /proc
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # of the listing itself, which is closed; or a file that can't be opened any more
                is_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                if is_read and stat.S_ISREG(os.fstat(descriptor).st_mode):
                    anew = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
                    os.lseek(anew, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
                    os.dup2(anew, descriptor, inheritable=os.get_inheritable(descriptor))
                    os.close(anew)
