"""ZB-H1: 1F1B with split backwards, whose weight parts fill time that would be idle.

Paper: Qi et al., Zero Bubble Pipeline Parallelism (ICLR'24) section 2.1 and figure 2. Forwards and input parts are in
1F1B's order. A stage of depth d_s delays its weight parts by depth - d_s units: then no stage has more units in flight
than 1F1B's first. With p equal stages the bubble is (p - 1) (T_F + T_B - T_W).
"""

from collections import deque
from collections.abc import Iterator, Sequence

from pipebench.schedule import one_f_one_b
from pipebench.schedule.operations import Op
from pipebench.schedule.passes import Pass
from pipebench.schedule.pipeline import Pipeline


def passes(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Yield a worker's passes between two flushes."""
    waiting: deque[Pass] = deque()
    for stage, op, unit in one_f_one_b.passes(p, worker, units):
        if op is Op.FORWARD:
            yield Pass(stage, op, unit)
            continue
        yield Pass(stage, Op.BACKWARD_INPUT, unit)
        waiting.append(Pass(stage, Op.BACKWARD_WEIGHT, unit))
        if len(waiting) > p.depth - p.warmups[stage]:
            yield waiting.popleft()
    yield from waiting
