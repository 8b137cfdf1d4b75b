"""Waiting on a loaded machine: how long tests wait for an event, and the lines that slow commands print.

Only a test that fails waits for so long.
"""

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_S = 600.0
_PHASE = re.compile(r"^(pipebench[\w ]*: (starting|loading \w+)|[\w.-]+  \S.*)(\n|\Z)", re.MULTILINE)


def without_phases(output: str) -> str:
    """Remove the lines that name a phase of more than 2 s: `pipebench run: loading torch`, `dp  preparing`."""
    return _PHASE.sub("", output)


def wait_for(condition: Callable[[], object], what: str = "a condition") -> None:
    """Wait until a condition holds; the test fails if it never does, and says for `what` it waited."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.01)


@contextmanager
def within_patience() -> Iterator[None]:
    """Fail if the block, in the main thread, waits for too long, for example for a pipe."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("nothing has happened for a long time")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
