"""Lets `malloc` keep freed blocks, so that the next minibatch reuses them without new pages.

By default glibc returns large blocks to the system when they are freed, and gets new, zeroed pages at the next use.
Activations and gradients are allocated and freed at every minibatch, so training on CPUs is up to twice as fast with
this.
"""

import ctypes
import os
from collections.abc import Callable

_MOST_BYTES = 1 << 30
# glibc's environment variables, and the numbers of the same settings for `mallopt`, from its malloc.h.
_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
HEAP = {name: str(_MOST_BYTES) for name in _SETTINGS}  # environment of a process that is to be started


def keep_freed_blocks() -> None:
    """Let this process keep freed blocks, unless it has no glibc or the user has set one of the variables."""
    mallopt = _of_libc("mallopt")
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        return
    for number in _SETTINGS.values():
        mallopt(number, _MOST_BYTES)


def return_freed_blocks() -> None:
    """Return all freed memory to the system once, if there is glibc: after work that needs more than what follows."""
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    return found
