"""Pipes between a launcher and its workers, which inherit them: when it can record, and how far the run is.

The launcher imports what sends a run to MLflow, which takes seconds of a core, while workers start; measuring and
training wait for the end of it. A worker writes its progress as lines of JSON, which the launcher reads.
"""

import contextlib
import json
import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_RECORDER = "PIPEBENCH_RECORDER"  # file descriptor of the pipe's end to read from


@contextmanager
def announcing_ready(wait_until_ready: Callable[[], object]) -> Iterator[Mapping[str, int]]:
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


def ready_listener() -> Callable[[float], bool] | None:
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


_PROGRESS = "PIPEBENCH_PROGRESS"  # file descriptor of the pipe's end to write to
_LAST_LINES_S = 5.0  # for the reader, once the workers have ended
Hear = Callable[[dict[str, Any]], None]


@contextmanager
def receiving_progress(hear: Hear | None) -> Iterator[Mapping[str, int]]:
    """Call `hear` with what a worker tells, in a thread; what `hear` raises is raised at the end.

    Yields the file descriptors that workers inherit, by the environment variable that tells them; none without `hear`.
    """
    if hear is None:
        yield {}
        return
    reading, writing = os.pipe()
    raised: list[Exception] = []

    def listen() -> None:
        with os.fdopen(reading, encoding="utf-8") as lines:
            for line in lines:
                try:
                    if not raised:
                        hear(json.loads(line))
                except Exception as error:  # read on: a worker must not wait for a full pipe
                    raised.append(error)

    thread = threading.Thread(target=listen, name="pipebench-progress", daemon=True)
    thread.start()
    try:
        yield {_PROGRESS: writing}
    finally:
        os.close(writing)
        thread.join(_LAST_LINES_S)
    if raised:
        raise raised[0]


def progress_sender() -> Hear | None:
    """Return what sends a worker's progress to its launcher; None if that doesn't ask for it."""
    given = os.environ.get(_PROGRESS)
    if given is None:
        return None
    writing = int(given)

    def tell(facts: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher may be ending
            os.write(writing, f"{json.dumps(facts)}\n".encode())

    return tell
