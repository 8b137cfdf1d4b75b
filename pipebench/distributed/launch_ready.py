"""Tells workers when their launcher can record them: it closes a pipe that they inherit.

The launcher imports what sends a run to MLflow, which takes seconds of a core, while workers start; measuring and
training wait for the end of it.
"""

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

_RECORDER = "PIPEBENCH_RECORDER"  # file descriptor of the pipe's end to read from


@contextmanager
def ready_told(wait_until_ready: Callable[[], object]) -> Iterator[Mapping[str, int]]:
    """Tell workers when `wait_until_ready`, called in a thread, has returned.

    Yields the file descriptors that workers inherit, by the environment variable that tells them.
    """
    reading, writing = os.pipe()

    def tell() -> None:
        wait_until_ready()
        os.close(writing)

    threading.Thread(target=tell, name="pipebench-ready", daemon=True).start()
    try:
        yield {_RECORDER: reading}
    finally:
        os.close(reading)


def ready_heard() -> Callable[[float], bool] | None:
    """Return what waits up to some seconds until the launcher can record, and returns whether it can.

    None if no launcher records this process.
    """
    given = os.environ.get(_RECORDER)
    if given is None:
        return None
    reading = int(given)

    def wait(limit_s: float) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(select.select([reading], [], [], limit_s)[0])
        return False

    return wait
