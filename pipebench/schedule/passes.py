"""Passes: what orders of work are made of, and the order of forwards that several of them share."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline


class Pass(NamedTuple):
    """One unit through one stage, in one direction: a forward, a backward, or the input or weight part of one."""

    stage: int
    op: Op
    unit: int


def forwards(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Yield a worker's forwards: as many units as there are positions through its first stage, then its next, and on.

    So the first unit is back for the worker's second stage when the last of the group has left its first. A worker of
    one stage has its units in ascending order.
    """
    stages, positions = p.stages_of(worker), p.num_positions
    own = p.own_units(stages[0], worker, units)
    for start in range(0, len(own), positions):
        for stage in stages:
            for unit in own[start : start + positions]:
                yield Pass(stage, Op.FORWARD, unit)
