"""Passes, the elements of orders of work, and what is inserted between them: copies to the host, and collectives.

Sharded replicas gather weights before a pass, free them after it, and wait for the shards of their gradients. Paper:
ZeRO (Rajbhandari et al., SC'20). Each stage is a group of layers. Its weights are gathered one pass ahead, so that the
transfer overlaps with the pass before. These operations are collective: all replicas follow the list of the first one,
which has the most units, even where they have no unit of their own.
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
    """Yield a worker's forwards, in groups of as many units as there are positions.

    A group passes the worker's first stage, then its second, and so on. The first unit has been through the positions
    in between, and reaches the second stage, when the last unit leaves the first stage. With one stage, units are in
    ascending order.
    """
    own, positions = {stage: p.own_units(stage, worker, units) for stage in p.stages_of(worker)}, p.num_positions
    for start in range(0, max(map(len, own.values())), positions):
        for stage in own:
            for unit in own[stage][start : start + positions]:
                yield Pass(stage, Op.FORWARD, unit)


def numbered(steps: Iterable[tuple[int, Op]], units: Mapping[int, Sequence[int]]) -> Iterator[Pass]:
    """Yield the passes of steps (stage, op): the n-th of a stage and an op is of the n-th of the stage's units.

    Steps beyond a stage's last unit are left out, which can't deadlock.
    """
    done: Counter[tuple[int, Op]] = Counter()
    for stage, op in steps:
        kinds = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if op is Op.BACKWARD else (op,)
        number = done[stage, kinds[0]]
        done.update((stage, kind) for kind in kinds)
        if number < len(units[stage]):
            yield Pass(stage, op, units[stage][number])


def with_copies(passes: Iterable[Pass], swaps: Container[int]) -> Iterator[Pass]:
    """Yield a worker's passes between two flushes and, as further passes, the copies of the stages in `swaps`.

    A unit's copy out follows its forward. Its copy in precedes the backward before its own, to overlap with it, or its
    own backward if the unit runs forward between the two. Paper: vPipe (TPDS'21) section 4.1 prefetches before the
    predicted backward. Differs: the schedule knows which backward comes next.
    """
    held: list[Pass] = []  # from the last backward on, which the copy for the next backward may have to precede
    for each in passes:
        if each.op in FIRST_PARTS:
            if each.stage in swaps:
                back = Pass(each.stage, Op.SWAP_IN, each.unit)
                held.insert(len(held) if Pass(each.stage, Op.FORWARD, each.unit) in held else 0, back)
            yield from held
            held = [each]
            continue
        held.append(each)
        if each.op is Op.FORWARD and each.stage in swaps:
            held.append(Pass(each.stage, Op.SWAP_OUT, each.unit))
    yield from held


def with_gathers(passes: Sequence[Pass], *, reshards: bool) -> Iterator[Pass]:
    """Yield passes and, as further passes, those that gather their stages' weights before them and free them after.

    `reshards`: whether weights are also freed after a forward, and gathered again for its backward.
    """
    gathered: set[int] = set()  # stages whose gather has begun and whose weights haven't been freed since
    waited_for: set[int] = set()  # of these, the stages whose weights have arrived
    ahead = (each for each in [*passes, None] if each is None or each.op not in COPIES)
    next(ahead)
    for each in passes:
        if each.op in COPIES:  # needs no weights
            yield each
            continue
        for wanted in (each, next(ahead)):
            if wanted is not None and wanted.stage not in gathered:
                gathered.add(wanted.stage)
                yield Pass(wanted.stage, Op.GATHER, wanted.unit)
        if each.stage not in waited_for:
            waited_for.add(each.stage)
            yield Pass(each.stage, Op.WAIT_GATHER, each.unit)
        yield each
        if reshards or each.op in ENDS:
            gathered.discard(each.stage)
            waited_for.discard(each.stage)
            yield Pass(each.stage, Op.FREE, each.unit)


def with_scatters(passes: Sequence[Pass]) -> Iterator[Pass]:
    """Yield passes and, as further passes, the waits for the gradients' shards.

    A wait follows the backward after the one that ends the stage's round, so that the reduce-scatter overlaps with a
    backward.
    """
    last = {each.stage: index for index, each in enumerate(passes) if each.op in ENDS}
    waiting: list[Pass] = []  # for the next backward to have run
    due: list[Pass] = []  # now, but after the weights of that backward have been freed
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
    """Yield a replica's own passes, and the collective ones, given the passes of the first replica.

    `units` are those of all replicas.
    """
    replica, existing = p.replica_of(worker), units if isinstance(units, range) else {*units}
    for each in passes:
        unit = each.unit + replica
        if each.op in COLLECTIVE or unit in existing:
            yield each._replace(unit=unit)


COLLECTIVE = (Op.GATHER, Op.WAIT_GATHER, Op.FREE, Op.WAIT_SCATTER)
