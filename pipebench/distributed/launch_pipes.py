"""Pipes between a launcher and its workers, which inherit them.

One lets workers know when the launcher can record. While workers start, it imports what sends a run to MLflow, which
takes seconds of a core. Measuring and training wait until that has ended. The other carries a worker's progress, as
lines of JSON, to the launcher.
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
    """Let workers know when `wait_until_ready`, called in a thread, has returned.

    Yields the file descriptors that workers inherit, by the environment variable that gets their number.
    """
    reading, writing = os.pipe()

    def announce() -> None:
        wait_until_ready()
        os.close(writing)  # after which `reading` is at its end, which `select` reports

    threading.Thread(target=announce, name="pipebench-ready", daemon=True).start()
    try:
        yield {_RECORDER: reading}
    finally:
        os.close(reading)


def ready_listener() -> Callable[[float], bool] | None:
    """Return a function that waits, for up to some seconds, until the launcher can record; it returns whether it can.

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
    """Call `hear`, in a thread, with every message of `progress_sender`; raise at the end what `hear` raised.

    Yields the file descriptors that workers inherit, by the environment variable that gets their number; none without
    `hear`.
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
                except Exception as error:  # read on, because a worker would block on a full pipe
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
    """Return a function that sends a worker's progress to its launcher; None if the launcher doesn't ask for it."""
    given = os.environ.get(_PROGRESS)
    if given is None:
        return None
    writing = int(given)

    def send(facts: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the launcher may be ending
            os.write(writing, f"{json.dumps(facts)}\n".encode())

    return send
