"""1F1B for a flush that is short of minibatches, where replicas have unequal shares and fixed warm-ups can deadlock.

The order is that of an imagined execution in which every pass takes one unit of time and every worker obeys the
rule: backward if one is possible, else forward unless d_s units are in flight. Lists read off an execution that came
to its end can't deadlock; and this one always ends, because the oldest unfinished unit is first in line everywhere.
"""

from collections.abc import Sequence

from pipebench.schedule.operations import Op

Step = tuple[Op, int]  # forward or backward, unit


def short_group_orders(replicas: Sequence[int], depths: Sequence[int], units: Sequence[int]) -> list[list[Step]]:
    """Return every worker's passes, in order.

    Args:
        replicas: replicas per stage; unit u belongs to replica u mod r.
        depths: most units in flight per replica, per stage.
        units: the units of the group, ascending.
    """
    last = len(replicas) - 1
    places = [(stage, replica) for stage, r in enumerate(replicas) for replica in range(r)]
    own = [[unit for unit in units if unit % replicas[stage] == replica] for stage, replica in places]
    orders: list[list[Step]] = [[] for _ in places]
    forwarded = [0] * len(places)
    returned = [0] * len(places)
    reached = dict.fromkeys(units, -1)  # the last stage a unit has run forward at
    back_at = dict.fromkeys(units, last + 1)  # the first stage it has run backward at
    while any(count < len(mine) for count, mine in zip(returned, own, strict=True)):
        chosen: list[tuple[int, Step]] = []
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
