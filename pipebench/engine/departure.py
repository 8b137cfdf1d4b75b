"""Messages on their way out: when has one left, so that its buffer may be used again?

Gloo doesn't say that of a send unless it is waited for. So every sender has a thread that waits, and does nothing else:
what is sent, and in which order, is the training thread's business alone (P12).
"""

import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch


class Departure:
    """One message, waited for by a `Watcher`."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._left = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Wait until the message has left, or can't."""
        try:
            for work in self._works:
                work.wait()
        except Exception as error:
            self._error = error
        self._left.set()

    def has_left(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._left.is_set()

    def wait(self) -> None:
        """Wait for it here, too; raises what happened to it."""
        self._left.wait()
        if self._error is not None:
            raise self._error


class DirectDeparture:
    """Tensors on their way out by NCCL, whose sends do say whether they have left; a wait is the device's (P16).

    Args:
        works: torch's.
        tensors: kept for as long as they are read.
    """

    def __init__(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def has_left(self) -> bool:
        """Return whether the device has sent them."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Let what the device is given from now on wait for them."""
        for work in self._works:
            work.wait()


class Watcher:
    """The thread that waits for one sender's messages, in the order in which they set out; ends with its sender."""

    def __init__(self, name: str) -> None:
        self._departures: queue.SimpleQueue[Departure | None] = queue.SimpleQueue()
        threading.Thread(target=_watch, args=(self._departures,), name=name, daemon=True).start()
        weakref.finalize(self, self._departures.put, None)

    def watch(self, works: Sequence[Any]) -> Departure:
        """Return a departure that knows when these sends are done."""
        departure = Departure(works)
        self._departures.put(departure)
        return departure


def _watch(departures: "queue.SimpleQueue[Departure | None]") -> None:
    while (departure := departures.get()) is not None:
        departure.run()
        del departure  # nothing is kept while the next one is waited for
