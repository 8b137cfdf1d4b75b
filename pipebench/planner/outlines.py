"""Outlines, stages and their replicas, of all plans that may beat a known one, if they are few.

Lower bounds per stage rule out most plans of a few layers on a few workers, and memory some more. The remaining ones
are counted before they are listed.
"""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from pipebench.planner.flat import SearchStage
from pipebench.planner.states import Floats


class Outlines:
    """The outlines of a model's plans on at most `num_workers`; `last` is the state after the last layer.

    `alone_s` is a lower bound on a stage's seconds per minibatch; `fits` says whether one fits in memory with a number
    of workers behind it, and is called repeatedly.
    """

    def __init__(
        self,
        last: int,
        num_workers: int,
        alone_s: Callable[[SearchStage], float],
        fits: Callable[[SearchStage, int], bool],
    ) -> None:
        self._last, self._num_workers, self._fits = last, num_workers, fits
        self._seconds: Floats = np.full((last, last + 1, num_workers + 1), np.inf)  # [start, stop, replicas]
        for start in range(last):
            for stop in range(start + 1, last + 1):
                for replicas in range(1, num_workers + 1):
                    self._seconds[start, stop, replicas] = alone_s(SearchStage(start, stop, replicas))

    def below(self, limit_s: float) -> tuple[int, Iterator[tuple[SearchStage, ...]]]:
        """Return the number of outlines of stages that fit, with bounds below `limit_s`, and an iterator over them."""
        fast = [
            [SearchStage(start, stop, m) for stop, m in np.argwhere(self._seconds[start] < limit_s).tolist()]
            for start in range(self._last)
        ]

        @cache
        def following(start: int, workers: int) -> list[tuple[SearchStage, int]]:
            """List the stages from a state on so many workers, those behind included, and how many ways each leads."""
            stages = (stage for stage in fast[start] if stage.replicas <= workers)
            behind = ((stage, workers - stage.replicas) for stage in stages)
            ways = ((stage, left, count(stage.stop, left)) for stage, left in behind)
            return [(stage, number) for stage, left, number in ways if number and self._fits(stage, left)]

        @cache
        def count(start: int, workers: int) -> int:
            if start == self._last or workers == 0:
                return int(start == self._last and workers == 0)
            return sum(number for _, number in following(start, workers))

        def each(start: int, workers: int) -> Iterator[tuple[SearchStage, ...]]:
            if start == self._last:
                yield ()
                return
            for stage, _ in following(start, workers):
                yield from ((stage, *others) for others in each(stage.stop, workers - stage.replicas))

        used = range(1, self._num_workers + 1)
        return sum(count(0, workers) for workers in used), (plan for workers in used for plan in each(0, workers))
