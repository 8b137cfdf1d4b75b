"""Pauses Python's cyclic garbage collector where many objects are made, but no cycles.

While objects are made, the collector visits all live ones again and again: half a million after large libraries are
imported, and as many in a simulation of thousands of workers. None of them is garbage that only a collector finds.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector in this context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_all() -> None:
    """Exempt all existing objects from later collections, including the interpreter's last one.

    Does nothing once triton is imported: version 3.9 prints each of its objects that is left at the end as a leak.
    """
    if "triton" not in sys.modules:
        gc.freeze()
