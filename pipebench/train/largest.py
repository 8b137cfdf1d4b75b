"""The largest update that fits: how many whole minibatches a flush can take in before a device is out of memory.

PipeDream (SOSP'19, section 5.4) gives GPipe the largest number of minibatches that fits in memory, and doesn't say how
many that is. Here the memory model says it: what `MemoryForecast` predicts of a run is what is searched with, so that
the run keeps as much and no more.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from pipebench.errors import PlanError
from pipebench.formats import num_bytes
from pipebench.model.sampling import Sampler
from pipebench.planner.predict import PlannedWorkload
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.memory import StageMemoryCosts
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import simulate_all

_FURTHER: Final = 16  # times what is known to fit: the first few minibatches say little about many
_UPDATES: Final = 2  # the first makes the optimizer's state, which is there while the second one's units are kept


def with_largest_update(course: PlannedWorkload, memories: tuple[StageMemoryCosts, ...]) -> Pipeline:
    """Return a course's pipeline with as many minibatches per update as fit in memory, at most an epoch's.

    More minibatches never keep less where all run forward before the first runs backward.

    Args:
        course: what would run with one minibatch of every replica per update.
        memories: what its replicas keep, which doesn't depend on how many minibatches there are.

    Raises:
        PlanError: not even one fits.
    """
    pipeline, limit = course.pipeline, course.cluster.memory_bytes
    assert limit is not None, "validation refuses a cluster without a memory size"
    most = max(1, course.sampler.minibatches_per_epoch // pipeline.block)
    found = most_within(limit, partial(peak_bytes, course, memories), most)
    if found == 0:
        needed = peak_bytes(course, memories, 1)
        raise PlanError(
            f"parallelism.accumulate: not even one minibatch per update fits: it needs {num_bytes(needed)} on a "
            f"worker, and a {course.cluster.device} has {num_bytes(limit)}; what would help: more stages, or smaller "
            "minibatches"
        )
    return replace(pipeline, accumulate=found)


def peak_bytes(course: PlannedWorkload, memories: tuple[StageMemoryCosts, ...], accumulate: int) -> int:
    """Return what the fullest worker keeps at most, with so many minibatches of every replica per update."""
    pipeline = replace(course.pipeline, accumulate=accumulate)
    count, size = _UPDATES * pipeline.period, course.sampler.size(0)
    meter = MemoryMeter(pipeline, memories, course.costs)
    simulate_all(
        replace(course, pipeline=pipeline, sampler=Sampler(count * size, size, 0)), count, Meter(pipeline, meter)
    )
    return meter.timeline().fullest.num_bytes


def most_within(limit: float, value: Callable[[int], float], most: int) -> int:
    """Return the largest number from 1 to `most` whose value is within a limit, or 0.

    Values grow with their numbers, nearly in a straight line, which says where to look; the answer is exact whatever
    they do as long as they don't fall. Looking far beyond it would be what takes time.

    >>> most_within(50, lambda number: number * number, 1000)
    7
    """
    low, at_low = 1, value(1)
    if at_low > limit:
        return 0
    high, guess = most + 1, 2
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1, _FURTHER * low)
        found = value(guess)
        slope = (found - at_low) / (guess - low)
        if found <= limit:
            low, at_low = guess, found
        else:
            high = guess
        guess = low + int((limit - at_low) / slope) if slope > 0 else high
    return low
