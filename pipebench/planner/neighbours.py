"""Candidates of the local search: plans one step away from a plan and, if they are few, all plans that may beat it.

An outline is a plan's stages with their replicas, without devices. Of a few layers on a few workers, lower bounds per
stage rule out most outlines, and memory some more. The rest are counted before they are listed.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from pipebench.planner.activations import Floats
from pipebench.planner.flat import SearchStage, stages_between
from pipebench.planner.placement_costs import Sketch, along

_SPLITS = 8  # places at which a stage is split, at most
_FEW = 8  # replicas of a stage that are divided in all ways; more are divided in powers of two


def neighbours(sketch: Sketch, num_workers: int) -> Iterator[Sketch]:
    """Yield the plans one step away, at the same depth.

    Workers keep their devices if only a cut moves; otherwise they stand in order along the devices.
    """
    replicas, starts = list(sketch.replicas), [stage.start for stage in sketch.stages]
    bounds, count = [*starts, sketch.stages[-1].stop], len(replicas)
    idle = num_workers - sum(replicas)
    for index in range(1, count):
        step = 1
        while step < max(bounds[index] - bounds[index - 1], bounds[index + 1] - bounds[index]):
            for place in (bounds[index] - step, bounds[index] + step):
                if bounds[index - 1] < place < bounds[index + 1]:
                    moved = [*bounds[:index], place, *bounds[index + 1 :]]
                    yield Sketch(stages_between(moved, replicas), sketch.devices, sketch.depth)
            step *= 2
    for changed, widths in itertools.chain(
        ((bounds, each) for each in _moved_workers(replicas, idle)),
        _merged(bounds, replicas, idle),
        _split(bounds, replicas, idle),
    ):
        yield along_devices(stages_between(changed, widths), sketch.depth)


def along_devices(stages: tuple[SearchStage, ...], depth: int) -> Sketch:
    """Return a plan with its workers in order along the devices."""
    return Sketch(stages, tuple(map(tuple, along([stage.replicas for stage in stages]))), depth)


def _moved_workers(replicas: list[int], idle: int) -> Iterator[list[int]]:
    """Yield replicas with one worker moved between stages, added or removed."""
    stages = range(len(replicas))
    for more, less in itertools.permutations((*stages, None), 2):
        if (less is not None and replicas[less] == 1) or (less is None and idle == 0):
            continue
        yield [m + (stage == more) - (stage == less) for stage, m in enumerate(replicas)]


def _merged(bounds: list[int], replicas: list[int], idle: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield bounds and replicas with two neighbouring stages merged.

    The merged stage runs on the workers of the larger, of both, or of both and the idle ones.
    """
    for index in range(len(replicas) - 1):
        both = replicas[index : index + 2]
        for m in sorted({max(both), sum(both), sum(both) + idle}):
            yield bounds[: index + 1] + bounds[index + 2 :], [*replicas[:index], m, *replicas[index + 2 :]]


def _split(bounds: list[int], replicas: list[int], idle: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield bounds and replicas with one stage split in two."""
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        m, step = replicas[index] + idle, max(1, (stop - start) // _SPLITS)
        for place in range(start + step, stop, step):
            for first in _shares(m):
                yield (
                    [*bounds[: index + 1], place, *bounds[index + 1 :]],
                    [*replicas[:index], first, m - first, *replicas[index + 1 :]],
                )


def _shares(m: int) -> list[int]:
    """Return the first of two stages' shares of m workers: all, or powers of two if there are many."""
    if m <= _FEW:
        return list(range(1, m))
    powers = [1 << bit for bit in range(m.bit_length()) if 1 << bit < m]
    return sorted({*powers, *(m - power for power in powers)})


class Outlines:
    """The outlines of a model's plans.

    Args:
        last: the state after the last layer.
        num_workers: the most that a plan may use.
        alone_s: returns a lower bound on a stage's seconds per minibatch.
        fits: returns whether a stage fits in memory with a number of workers behind it; called repeatedly.
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
                others = (start > 0) + (stop < last)  # stages before and behind have at least one worker each
                for replicas in range(1, num_workers + 1 - others):
                    self._seconds[start, stop, replicas] = alone_s(SearchStage(start, stop, replicas))

    def below(self, limit_s: float) -> tuple[int, Iterator[tuple[SearchStage, ...]]]:
        """Return the number of outlines of stages that fit, with bounds below `limit_s`, and an iterator over them."""
        fast = [
            [SearchStage(start, stop, m) for stop, m in np.argwhere(self._seconds[start] < limit_s).tolist()]
            for start in range(self._last)
        ]

        @cache
        def following(start: int, workers: int) -> list[tuple[SearchStage, int]]:
            """Return the stages that may begin at a state, each with the number of outlines that begin with it.

            The outlines end with the model and use exactly `workers`.
            """
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
