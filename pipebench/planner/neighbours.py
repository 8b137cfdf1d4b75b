"""Plans one step away from a plan: the moves of the local search."""

import itertools
from collections.abc import Iterator, Sequence

from pipebench.planner.flat import SearchStage
from pipebench.planner.placement_costs import Sketch, along

_SPLITS = 8  # places at which a stage is split, at most
_FEW = 8  # replicas; more are shared out in powers of two


def neighbours(sketch: Sketch, num_workers: int) -> Iterator[Sketch]:
    """Yield the plans one step away, at the same depth.

    Workers keep their devices if replicas do not change; else they stand in order along the devices.
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
                    yield Sketch(_stages(moved, replicas), sketch.devices, sketch.depth)
            step *= 2
    for changed, widths in itertools.chain(
        ((bounds, each) for each in _moved_workers(replicas, idle)),
        _merged(bounds, replicas, idle),
        _split(bounds, replicas, idle),
    ):
        yield along_devices(_stages(changed, widths), sketch.depth)


def along_devices(stages: tuple[SearchStage, ...], depth: int) -> Sketch:
    """Return a plan with its workers in order along the devices."""
    return Sketch(stages, tuple(map(tuple, along([stage.replicas for stage in stages]))), depth)


def _stages(bounds: Sequence[int], replicas: Sequence[int]) -> tuple[SearchStage, ...]:
    return tuple(SearchStage(a, b, m) for (a, b), m in zip(itertools.pairwise(bounds), replicas, strict=True))


def _moved_workers(replicas: list[int], idle: int) -> Iterator[list[int]]:
    """Yield replicas with one worker moved between stages, added or removed."""
    stages = range(len(replicas))
    for more, less in itertools.permutations((*stages, None), 2):
        if (less is not None and replicas[less] == 1) or (less is None and idle == 0):
            continue
        yield [m + (stage == more) - (stage == less) for stage, m in enumerate(replicas)]


def _merged(bounds: list[int], replicas: list[int], idle: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield bounds and replicas with two neighbours merged, on as many workers as either had, both, or more."""
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
