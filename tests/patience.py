"""What a loaded machine changes: how long tests wait for what has to come, and what commands say that take 2 s.

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


def without_phases(said: str) -> str:
    """Return what was said without lines that name a phase of 2 s: `pipebench run: loading torch`, `dp  preparing`."""
    return _PHASE.sub("", said)


def wait_for(true: Callable[[], object]) -> None:
    """Wait until something holds; the test fails if it never does."""
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(0.01)


@contextmanager
def within_patience() -> Iterator[None]:
    """Fail instead of waiting for ever for what happens inside, in the main thread: for a pipe to be written to."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("nothing has happened for a long time")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
