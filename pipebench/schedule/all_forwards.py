"""GPipe's order: all forwards, then all backwards in reverse. Paper: GPipe (2019), figure 2c."""

from collections.abc import Iterator, Sequence

from pipebench.schedule.operations import Op
from pipebench.schedule.passes import Pass, forwards
from pipebench.schedule.pipeline import Pipeline


def passes(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Yield a worker's passes between two flushes."""
    there = list(forwards(p, worker, units))
    yield from there
    for stage, _, unit in reversed(there):
        yield Pass(stage, Op.BACKWARD, unit)
