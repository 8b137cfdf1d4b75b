"""How far a host runs ahead of its GPU: far enough to keep it busy and to ask for what comes next, no further.

A host that gives work to a GPU is done at once. Left alone it would run a whole segment ahead: hold the memory of all
that it has asked for, hear of a stop or of a lost peer long after, and tell a progress that isn't one.
"""

from collections import deque

import torch

_AHEAD = 2  # forwards and backwards that a GPU has been given and not begun to end: one that runs, one that follows


class Pace:
    """Keeps the host at most two forwards or backwards ahead of the device; on a CPU it never is.

    No circle can come of it: what is waited for is an earlier piece of work of the same list, and all before it. On
    a CPU it does nothing; the tests make a GPU up.

    Args:
        device: where the worker computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """A forward or backward has been given to the device; wait for the one two before it."""
        if self._device.type != "cuda":
            return
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # sleeps: a waiting host may share a core
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > _AHEAD:
            self._ends.popleft().synchronize()
