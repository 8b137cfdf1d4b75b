"""The bytes of process groups that are still queued in the kernel's sockets.

Gloo writes to its sockets what they take, without reporting when it has left. The kernel counts unconfirmed bytes for
every socket. Linux only; elsewhere nothing counts as queued.
"""

import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress

_FILES = "/proc/self/fd"
_COUNT = struct.Struct("i")


class Sockets:
    """Some of this process's connections, by file descriptor, with names that tell reused descriptors apart."""

    def __init__(self, files: dict[int, str]) -> None:
        self._files = files

    def queued_bytes(self) -> int:
        """Return the bytes written that the other ends haven't confirmed."""
        return sum(_unconfirmed(file) for file, name in self._files.items() if _name(file) == name)


def opened_since(before: Sockets) -> Sockets:
    """Return the connections opened since."""
    return Sockets({file: name for file, name in open_sockets()._files.items() if before._files.get(file) != name})


def open_sockets() -> Sockets:
    """Return all connections of this process, without listening sockets."""
    files = [int(name) for name in os.listdir(_FILES)] if os.path.isdir(_FILES) else []
    return Sockets({file: name for file in files if (name := _name(file)).startswith("socket:") and _is_joined(file)})


def _name(file: int) -> str:
    with suppress(OSError):
        return os.readlink(f"{_FILES}/{file}")
    return ""


def _is_joined(file: int) -> bool:
    """Return whether a file is a TCP connection."""
    with suppress(OSError), socket.socket(fileno=os.dup(file)) as found:
        found.getpeername()
        return found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    return False


def _unconfirmed(file: int) -> int:
    with suppress(OSError):
        (count,) = _COUNT.unpack(fcntl.ioctl(file, termios.TIOCOUTQ, bytes(_COUNT.size)))
        return int(count)
    return 0
