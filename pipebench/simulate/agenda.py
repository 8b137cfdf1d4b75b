"""What is still to happen: actions by time, equal times by priority and then in the order they were put down."""

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[float], object]  # is told the time
Entry = tuple[float, int, int, int, object]  # time [s], priority, counter, worker or NOBODY, payload or action

LINKS, WORKERS, RATES = 0, 1, 2  # priorities: at equal times links come before workers, and what they share last
NOBODY = -1  # in the place of a worker: the entry is an action


class Agenda:
    """A heap of entries.

    Attributes:
        heap: the entries; whoever plays a schedule reads and writes it too.
        counter: numbers them.
    """

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.counter = itertools.count()

    def push(self, time_s: float, action: Action, priority: int = LINKS) -> None:
        """Let an action happen at a time, before what workers do then, unless it has another priority."""
        heapq.heappush(self.heap, (time_s, priority, next(self.counter), NOBODY, action))

    def play(self) -> None:
        """Let everything happen; only actions are left."""
        while self.heap:
            now_s, _, _, _, action = heapq.heappop(self.heap)
            action(now_s)  # type: ignore[operator]
