"""The largest update that fits in memory: the number of minibatches per flush.

PipeDream (SOSP'19, section 5.4) gives GPipe the largest number of minibatches that fits in memory, without saying how
it is found. Here it is found with the memory model, the same prediction as `MemoryForecast`'s.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from pipebench.errors import PlanError
from pipebench.formats import a_or_an, num_bytes
from pipebench.model.sampling import Sampler
from pipebench.planner.predict import PlannedWorkload
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.memory import StageMemoryCosts
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import simulate_all

_FURTHER: Final = 16  # a guess is at most so many times a number that fits: a few minibatches say little about many
_UPDATES: Final = 2  # simulated: the first creates the optimizer's state, which the second has from its start


def with_largest_update(workload: PlannedWorkload, memories: tuple[StageMemoryCosts, ...]) -> Pipeline:
    """Return a workload's pipeline with the most minibatches per update that fit in memory, at most an epoch's.

    More minibatches never need less memory, since all run forward before the first runs backward. `workload` has one
    minibatch of every replica per update.

    Raises:
        PlanError: not even one fits.
    """
    pipeline, limit = workload.pipeline, workload.cluster.memory_bytes
    assert limit is not None, "validation refuses a cluster without a memory size"
    most = most_of_epoch(pipeline, workload.sampler)
    found = most_within(limit, partial(peak_bytes, workload, memories), most)
    if found == 0:
        needed = peak_bytes(workload, memories, 1)
        raise PlanError(
            f"parallelism.accumulate: not even one minibatch per update fits: it needs {num_bytes(needed)} on a "
            f"worker, and {a_or_an(workload.cluster.device)} has {num_bytes(limit)}; what would help: "
            "more stages, or smaller minibatches"
        )
    return replace(pipeline, accumulate=found)


def most_of_epoch(pipeline: Pipeline, sampler: Sampler) -> int:
    """Return the most minibatches of every replica per update that an epoch has, at least 1."""
    return max(1, sampler.minibatches_per_epoch // pipeline.block)


def peak_bytes(workload: PlannedWorkload, memories: tuple[StageMemoryCosts, ...], accumulate: int) -> int:
    """Return the fullest worker's peak bytes, with `accumulate` minibatches of every replica per update."""
    pipeline = replace(workload.pipeline, accumulate=accumulate)
    count, size = _UPDATES * pipeline.period, workload.sampler.size(0)
    meter = MemoryMeter(pipeline, memories, workload.costs)
    simulate_all(
        replace(workload, pipeline=pipeline, sampler=Sampler(count * size, size, 0)), count, Meter(pipeline, meter)
    )
    return meter.timeline().fullest.num_bytes


def most_within(limit: float, value: Callable[[int], float], most: int) -> int:
    """Return the largest number from 1 to `most` whose value is at most `limit`, or 0.

    Values must not fall. A guess assumes that they grow linearly, which affects the number of calls only.

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
