"""Pauses Python's cyclic garbage collector where many objects are made and none of them in cycles.

The collector visits all live objects again and again while more are made: half a million, none of them garbage, after
imports of large libraries; as many in a simulation of thousands of workers, which needs no collector to free others.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_all() -> None:
    """Exempt the objects that exist from every later collection, the interpreter's last one included.

    Not with triton: as of 3.9 it prints those of its objects that are left at the end as leaks.
    """
    if "triton" not in sys.modules:
        gc.freeze()
