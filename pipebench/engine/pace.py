"""Limits how far a host runs ahead of its GPU: enough to keep it busy.

Launches on a GPU are asynchronous. Without a limit the host would run a whole segment ahead: it would allocate for all
of it, notice a stop or a lost peer late, and report false progress.
"""

from collections import deque

import torch

_AHEAD = 2  # launched and unfinished forwards or backwards: one running, one queued


class Pace:
    """Keeps the host at most two forwards or backwards ahead of `device`; does nothing on a CPU.

    It cannot deadlock, since it waits only for earlier work of the same list.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Record the launch of a forward or backward; wait for the one two before it."""
        if self._device.type != "cuda":
            return
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # sleeps: a waiting host may share a core
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > _AHEAD:
            self._ends.popleft().synchronize()
