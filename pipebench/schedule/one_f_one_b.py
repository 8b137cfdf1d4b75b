"""1F1B: warm up, then one backward and one forward in turn. Paper: PipeDream (SOSP'19) section 3.2, 1F1B-RR."""

from collections.abc import Iterator, Sequence

from pipebench.schedule.operations import Op
from pipebench.schedule.passes import Pass
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.short_group import short_group_orders


def passes(p: Pipeline, worker: int, units: Sequence[int]) -> Iterator[Pass]:
    """Yield a worker's passes: d_s forwards, then backward and forward in turn, then what is left of the backwards.

    A group between two flushes that is short of minibatches has its order from elsewhere, see `short_group`.
    """
    (stage,) = p.stages_of(worker)
    if p.flushes and len(units) < p.period * p.microbatches:
        for op, unit in short_group_orders(p.replicas, p.warmups, units)[worker]:
            yield Pass(stage, op, unit)
        return
    own, warmup = p.own_units(stage, worker, units), p.warmups[stage]
    for unit in own[:warmup]:
        yield Pass(stage, Op.FORWARD, unit)
    for index, unit in enumerate(own):
        yield Pass(stage, Op.BACKWARD, unit)
        if index + warmup < len(own):
            yield Pass(stage, Op.FORWARD, own[index + warmup])
