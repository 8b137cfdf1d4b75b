"""Ctrl-C in a run whose workers share this process: the first one ends it at the next drain, a second one at once."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pipebench.engine.admission import StopRequest

STOPPING = "pipebench: stopping at the next drain; Ctrl-C again ends now"


@contextmanager
def stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM ask for a stop, and the next one raise KeyboardInterrupt.

    Signals are heard only in the main thread; one that whoever started this process wants ignored stays so.
    """

    def hear(number: int, frame: FrameType | None) -> None:
        if stop.reason is not None:
            raise KeyboardInterrupt
        stop.reason = "interrupted"
        with contextlib.suppress(OSError, RuntimeError):  # the terminal is gone, or in the middle of a line
            print(STOPPING, file=sys.stderr, flush=True)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, hear)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
