"""The event queue: actions by time; ties by priority, then in order of insertion."""

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[float], object]  # called with the time
Entry = tuple[float, int, int, int, object]  # time [s], priority, counter, worker or NO_WORKER, payload or action

LINKS, WORKERS, RATES = 0, 1, 2  # priorities: at equal times links come first, then workers, then new rates
NO_WORKER = -1  # the entry is an action


class Agenda:
    """A heap of entries; the simulation's loop also uses `heap` and `counter` directly."""

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self.counter = itertools.count()

    def push(self, time_s: float, action: Action, priority: int = LINKS) -> None:
        """Schedule an action, by default before the workers' actions at that time."""
        heapq.heappush(self.heap, (time_s, priority, next(self.counter), NO_WORKER, action))

    def play(self) -> None:
        """Run until the queue is empty; it must hold actions only."""
        while self.heap:
            now_s, _, _, _, action = heapq.heappop(self.heap)
            action(now_s)  # type: ignore[operator]
