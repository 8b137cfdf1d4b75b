"""Sharded replicas: where a worker's passes gather weights, free them, and wait for their gradients' shards.

Paper: ZeRO (Rajbhandari et al., SC'20). Each stage is a group of layers; its weights are gathered one pass ahead, so
that the transfer overlaps with the pass before. Gathers are collective: a replica without a unit takes part in those of
the first replica, which has the most units.
"""

import itertools
from collections.abc import Iterator, Sequence

from pipebench.schedule.instructions import ENDS
from pipebench.schedule.operations import Op
from pipebench.schedule.passes import Pass
from pipebench.schedule.pipeline import Pipeline


def with_gathers(passes: Sequence[Pass], *, reshards: bool) -> Iterator[Pass]:
    """Yield passes and, as passes too, what gathers their stages' weights before and frees them after.

    `reshards`: whether weights are also freed after a forward, and gathered again for its backward.
    """
    there: set[int] = set()  # stages whose weights are gathered or on their way
    coming: set[int] = set()  # of these, the latter
    for each, following in itertools.pairwise([*passes, None]):
        assert each is not None
        for wanted in (each, following):
            if wanted is not None and wanted.stage not in there:
                there.add(wanted.stage)
                coming.add(wanted.stage)
                yield Pass(wanted.stage, Op.GATHER, wanted.unit)
        if each.stage in coming:
            coming.discard(each.stage)
            yield Pass(each.stage, Op.WAIT_GATHER, each.unit)
        yield each
        if reshards or each.op in ENDS:
            there.discard(each.stage)
            yield Pass(each.stage, Op.FREE, each.unit)


def with_scatters(passes: Sequence[Pass]) -> Iterator[Pass]:
    """Yield passes and, as passes too, the waits for gradients' shards, one backward after those that end a round."""
    last = {each.stage: index for index, each in enumerate(passes) if each.op in ENDS}
    waiting: list[Pass] = []
    due: list[Pass] = []
    for index, each in enumerate(passes):
        if each.op is not Op.FREE:
            yield from due
            due = []
        yield each
        if each.op in ENDS:
            due, waiting = waiting, []
            if last[each.stage] == index:
                waiting = [Pass(each.stage, Op.WAIT_SCATTER, each.unit)]
    yield from [*due, *waiting]


def own_passes(p: Pipeline, worker: int, passes: Sequence[Pass], units: Sequence[int]) -> Iterator[Pass]:
    """Yield a replica's passes, given those of the first with all that is collective, which it takes part in."""
    replica, there = p.replica_of(worker), units if isinstance(units, range) else {*units}
    for each in passes:
        unit = each.unit + replica
        if each.op in COLLECTIVE or unit in there:
            yield each._replace(unit=unit)


COLLECTIVE = (Op.GATHER, Op.WAIT_GATHER, Op.FREE, Op.WAIT_SCATTER)
