"""Passes, of which orders of work consist: the order of forwards that several share, and what stands between passes.

Sharded replicas gather weights, free them, and wait for their gradients' shards. Paper: ZeRO (Rajbhandari et al.,
SC'20). Each stage is a group of layers; its weights are gathered one pass ahead, so that the transfer overlaps with the
pass before. Gathers are collective: a replica without a unit takes part in those of the first replica, which has the
most units.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pipebench.schedule.instructions import COPIES, ENDS, FIRST_PARTS
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline


class Pass(NamedTuple):
    """One unit through one stage: a forward, a backward, or the input or weight part of one."""

    stage: int
    op: Op
    unit: int


def forwards(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Yield a worker's forwards: as many units as there are positions through its first stage, then its next, and on.

    So the first unit reaches the worker's second stage when the last of the group has left its first. With one stage,
    units are in ascending order.
    """
    own, positions = {stage: p.own_units(stage, worker, units) for stage in p.stages_of(worker)}, p.num_positions
    for start in range(0, max(map(len, own.values())), positions):
        for stage in own:
            for unit in own[stage][start : start + positions]:
                yield Pass(stage, Op.FORWARD, unit)


def numbered(steps: Iterable[tuple[int, Op]], units: Mapping[int, Sequence[int]]) -> Iterator[Pass]:
    """Yield passes (stage, op), each of the stage's next unit; leaving out those beyond `units` can't deadlock."""
    done: Counter[tuple[int, Op]] = Counter()
    for stage, op in steps:
        kinds = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if op is Op.BACKWARD else (op,)
        number = done[stage, kinds[0]]
        done.update((stage, kind) for kind in kinds)
        if number < len(units[stage]):
            yield Pass(stage, op, units[stage][number])


def with_copies(passes: Iterable[Pass], swaps: Container[int]) -> Iterator[Pass]:
    """Yield a worker's passes between two flushes and, as passes too, the copies of the stages in `swaps`.

    A unit's copy out follows its forward. Its copy in stands right before the worker's preceding backward if the unit
    has run forward by then, and overlaps with it; else right before its own. Paper: vPipe (TPDS'21) section 4.1
    prefetches before the predicted backward; here the order of work predicts it.
    """
    held: list[Pass] = []  # from the last backward on: what comes in before it is known at the next
    for each in passes:
        if each.op in FIRST_PARTS:
            ahead = []
            if each.stage in swaps:
                back = Pass(each.stage, Op.SWAP_IN, each.unit)
                if Pass(each.stage, Op.FORWARD, each.unit) in held:
                    held.append(back)
                else:
                    ahead.append(back)
            yield from ahead
            yield from held
            held = [each]
            continue
        held.append(each)
        if each.op is Op.FORWARD and each.stage in swaps:
            held.append(Pass(each.stage, Op.SWAP_OUT, each.unit))
    yield from held


def with_gathers(passes: Sequence[Pass], *, reshards: bool) -> Iterator[Pass]:
    """Yield passes and, as passes too, what gathers their stages' weights before and frees them after.

    `reshards`: whether weights are also freed after a forward, and gathered again for its backward.
    """
    there: set[int] = set()  # stages whose weights are gathered or on their way
    coming: set[int] = set()  # of these, the latter
    ahead = (each for each in [*passes, None] if each is None or each.op not in COPIES)
    next(ahead)
    for each in passes:
        if each.op in COPIES:  # needs no weights
            yield each
            continue
        for wanted in (each, next(ahead)):
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
