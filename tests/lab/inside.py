"""Starts a command in a lab: `python inside.py NAMESPACE HOST COMMAND...` is replaced by COMMAND.

It enters the network namespace and sets the host name, in a namespace of its own. Only the standard library is
imported, so that it starts fast.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Sequence

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


def main(words: Sequence[str]) -> None:
    """Replace this process by the command; `words` are the namespace, the host name and the command."""
    namespace, host, *command = words
    with open(f"/run/netns/{namespace}") as network:
        _check(_libc.setns(network.fileno(), _CLONE_NEWNET))
    _check(_libc.unshare(_CLONE_NEWUTS))
    socket.sethostname(host)
    os.execvp(command[0], command)


_libc = ctypes.CDLL(None, use_errno=True)


def _check(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main(sys.argv[1:])
