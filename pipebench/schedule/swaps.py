"""Where a worker's copies begin: what a stage saves of a unit goes to the host after its forward, and comes back.

The copy back begins one backward ahead, so that it has that backward's time, and whatever the worker waits, to end in.
Paper: vPipe (TPDS'21) section 4.1, which prefetches before the predicted backward; here the order of work predicts it.
"""

from collections.abc import Container, Iterable, Iterator

from pipebench.schedule.instructions import FIRST_PARTS
from pipebench.schedule.operations import Op
from pipebench.schedule.passes import Pass


def with_copies(passes: Iterable[Pass], swaps: Container[int]) -> Iterator[Pass]:
    """Yield a worker's passes between two flushes and, as passes too, the copies of the stages in `swaps`.

    A unit's copy out stands right after its forward. Its copy in stands right before the backward that comes before the
    unit's own on this worker, if the unit has been forward by then; else right before its own.
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
