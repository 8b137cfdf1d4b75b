"""What a mode's plans may do where memory binds: share out optimizer state, run layers again, or both.

Weights in training stay those of a plan that does neither, so the planner may choose, by predicted time among what
fits. Memory binds where the plan that would be best without a limit doesn't fit; elsewhere nothing is chosen, though
replicas with shards step faster.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from pipebench.errors import PlanError
from pipebench.planner.estimates import Estimator
from pipebench.planner.plans import MemoryChoice, PlanEstimate, Request
from pipebench.planner.refusal import lacks_places
from pipebench.schedule.modes import Mode
from pipebench.schedule.syncs import OPTIMIZER

Best = Callable[[Request], PlanEstimate]  # of a request in one mode; raises a PlanError if nothing fits


def best_choice(of: Estimator, best: Best) -> PlanEstimate:
    """Return the best plan of a mode; if memory binds, of all that its request leaves open.

    `best` returns the best plan of a request that leaves nothing open, and of `of.request` as if it did.

    Raises:
        PlanError: nothing fits; says what the mode as it is needs.
    """
    found = {of.mode: _tried(best, of.request)}
    own = found[of.mode]
    rows = [] if isinstance(own, PlanError) and lacks_places(of) else [*open_rows(of)]
    closed = replace(of.request, may_shard=(), may_recompute=False)
    if rows and (isinstance(own, PlanError) or (not _fits_whole(of) and _binds(of, best, closed, own))):
        found |= {row: _tried(best, replace(closed, row=row)) for row in rows}
    plans = {row: each for row, each in found.items() if isinstance(each, PlanEstimate)}
    if isinstance(own, PlanError) and not plans:
        raise PlanError(f"{own}; with {_choice(rows[-1])} none fits either") if rows else own
    chosen = min(plans, key=lambda row: plans[row].minibatch_s)
    if len(found) == 1:
        return plans[chosen]
    ordered = sorted(found, key=lambda row: row != chosen)  # the others stay in order
    times_s = {row: each.minibatch_s for row, each in plans.items()}
    tried = tuple(replace(_choice(row), minibatch_s=times_s.get(row)) for row in ordered)
    made = replace(plans[chosen], choices=tried)
    if chosen == of.mode:
        return made
    shard = None if chosen.shard == of.mode.shard else chosen.shard
    return replace(made, plan=replace(made.plan, shard=shard), found_by=f"{made.found_by}, with {tried[0]}")


def _choice(row: Mode) -> MemoryChoice:
    return MemoryChoice(row.shard, row.recompute, None)


def open_rows(of: Estimator) -> Iterator[Mode]:
    """Yield the mode's row with everything that plans may do besides what it says.

    Nothing under the papers' cost models, which know no shards; no shards in straight plans, which have no replicas.
    """
    request, mode = of.request, of.mode
    if request.cluster.memory_bytes is None or not request.model.has_ports or mode.shape in ("one", "one-stage"):
        return
    shards, again = [mode.shard], [mode.recompute]
    if of.name in request.may_shard and not mode.is_sharded and mode.shape != "straight":
        shards.append(OPTIMIZER)
    if request.may_recompute and not mode.recompute:
        again.append(True)
    rows = (replace(mode, shard=shard, recompute=recompute) for recompute in again for shard in shards)
    yield from (row for row in rows if row != mode)


def _fits_whole(of: Estimator) -> bool:
    """Return whether one device holds twice the whole model, with as many units in flight as any stage can have.

    Then memory binds nowhere, which no search need find out. Twice, since a stage has buffers for what it sends.
    """
    limit = of.request.cluster.memory_bytes
    assert limit is not None
    rule, states = of.memory(limit), of.work.states
    deepest = rule.in_flight or max(1 + of.request.cluster.num_workers, of.request.depth or 1)
    return 2 * rule.num_bytes(states, 0, len(states) - 1, deepest) <= rule.limit_bytes


def _binds(of: Estimator, best: Best, closed: Request, own: PlanEstimate) -> bool:
    """Return whether a plan that doesn't fit is faster than the best that does."""
    limit = of.request.cluster.memory_bytes
    assert limit is not None
    fastest = best(replace(closed, cluster=replace(of.request.cluster, memory_bytes=None)))
    return fastest.minibatch_s < own.minibatch_s and fastest.memory_bytes > of.memory(limit).limit_bytes


def _tried(best: Best, request: Request) -> PlanEstimate | PlanError:
    try:
        return best(request)
    except PlanError as error:
        return error
