"""1F1B: warm up, then one backward and one forward in turn. Paper: PipeDream (SOSP'19) section 3.2, 1F1B-RR."""

from collections.abc import Iterator, Sequence

from pipebench.schedule.operations import Op
from pipebench.schedule.passes import Pass
from pipebench.schedule.pipeline import Pipeline

_Step = tuple[Op, int]  # forward or backward, unit


def passes(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Yield a worker's passes: d_s forwards, then backward and forward in turn, then the remaining backwards.

    A short group between two flushes has its own order, see `_short_group_orders`.
    """
    (stage,) = p.stages_of(worker)
    if p.flushes and len(units) < p.period * p.microbatches:
        for op, unit in _short_group_orders(p.replicas, p.warmups, units)[worker]:
            yield Pass(stage, op, unit)
        return
    own, warmup = p.own_units(stage, worker, units), p.warmups[stage]
    for unit in own[:warmup]:
        yield Pass(stage, Op.FORWARD, unit)
    for index, unit in enumerate(own):
        yield Pass(stage, Op.BACKWARD, unit)
        if index + warmup < len(own):
            yield Pass(stage, Op.FORWARD, own[index + warmup])


def _short_group_orders(replicas: Sequence[int], depths: Sequence[int], units: Sequence[int]) -> list[list[_Step]]:
    """Return every worker's passes in a group of units whose replicas have unequal shares: fixed depths may deadlock.

    Unit u belongs to replica u mod r; `depths` are the most units in flight per replica. The order is that of a
    simulated execution in which every pass takes one unit of time and every worker prefers backwards, else runs a
    forward unless d_s units are in flight. Lists read off a finished execution can't deadlock, and this one always
    finishes, because the oldest unfinished unit is first in line everywhere.
    """
    last = len(replicas) - 1
    places = [(stage, replica) for stage, r in enumerate(replicas) for replica in range(r)]
    own = [[unit for unit in units if unit % replicas[stage] == replica] for stage, replica in places]
    orders: list[list[_Step]] = [[] for _ in places]
    forwarded = [0] * len(places)
    returned = [0] * len(places)
    reached = dict.fromkeys(units, -1)  # the last stage a unit has run forward at
    back_at = dict.fromkeys(units, last + 1)  # the first stage it has run backward at
    while any(count < len(mine) for count, mine in zip(returned, own, strict=True)):
        chosen: list[tuple[int, _Step]] = []
        for worker, (stage, _) in enumerate(places):
            mine, started, ended = own[worker], forwarded[worker], returned[worker]
            if ended < started and back_at[mine[ended]] == stage + 1 and reached[mine[ended]] == last:
                chosen.append((worker, (Op.BACKWARD, mine[ended])))
            elif started < len(mine) and started - ended < depths[stage] and reached[mine[started]] == stage - 1:
                chosen.append((worker, (Op.FORWARD, mine[started])))
        for worker, (op, unit) in chosen:
            orders[worker].append((op, unit))
            if op is Op.FORWARD:
                forwarded[worker] += 1
                reached[unit] += 1
            else:
                returned[worker] += 1
                back_at[unit] -= 1
    return orders
