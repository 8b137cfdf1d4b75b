"""One unit at a time, forward and backward through all of a worker's stages: data parallelism in groups of layers."""

from collections.abc import Iterator, Sequence

from pipebench.schedule.operations import Op
from pipebench.schedule.passes import Pass
from pipebench.schedule.pipeline import Pipeline


def passes(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Yield a worker's passes between two flushes."""
    stages = p.stages_of(worker)
    for unit in p.own_units(stages[0], worker, units):
        for stage in stages:
            yield Pass(stage, Op.FORWARD, unit)
        for stage in reversed(stages):
            yield Pass(stage, Op.BACKWARD, unit)
