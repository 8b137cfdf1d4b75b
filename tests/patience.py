"""How long tests wait for what has to come: only a test that fails waits for so long, on however loaded a machine."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_S = 600.0


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
