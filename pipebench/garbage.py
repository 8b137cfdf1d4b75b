"""Python's search for cyclic garbage, left out where much is made and none of it is in cycles.

The search looks at every object that lives, again and again while more are made. Imports of large libraries make half a
million, none of them garbage; a simulation of thousands of workers has as many that wait, and frees the others at once.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the garbage collector from searching."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
