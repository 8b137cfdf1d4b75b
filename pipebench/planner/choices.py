"""What plans do where memory binds: shard optimizer state, recompute layers, or both; and the error if none fits.

Neither changes the weights that training gives, so the planner may choose: of the plans that fit, the fastest as
predicted. Memory binds if the plan that would be best without a limit doesn't fit. Otherwise nothing is chosen,
although sharded replicas have shorter optimizer steps.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pipebench.errors import PlanError
from pipebench.formats import a_or_an, num_bytes
from pipebench.model.plan import too_few_places
from pipebench.planner.estimates import Estimator
from pipebench.planner.flat import SearchStage
from pipebench.planner.memory import StraightPlans
from pipebench.planner.plans import MemoryChoice, PlanEstimate, Request
from pipebench.planner.searches import Searches
from pipebench.profile.model import Profile
from pipebench.schedule.modes import SWAP, Mode
from pipebench.schedule.orders import order_of
from pipebench.schedule.pipeline import SPLIT
from pipebench.schedule.syncs import OPTIMIZER


def why_nothing_fits(estimator: Estimator) -> str:
    """Return a sentence on the memory that the leanest plan lacks, and on the changes that would make one fit."""
    request, mode, limit = estimator.request, estimator.mode, float(estimator.request.cluster.memory_bytes or 0)
    needed = least_memory(estimator)
    if math.isinf(needed):
        return _too_few_places(estimator)

    def fits(changed: Request, name: str = estimator.name) -> bool:
        return least_memory(Estimator(changed, name, estimator.cache)) <= limit

    ways = []
    recomputing = replace(request, row=replace(mode, recompute=True), memory=None)
    swapping = replace(request, memory=(SWAP,) * len(estimator.memory_policies))
    if not mode.recompute and mode.shape in ("any", "equal", "even") and fits(recomputing):
        ways.append("parallelism.recompute: true")
    if _may_swap(estimator) and fits(swapping):
        ways.append("parallelism.swap_layers: ['*']")
    if mode.shape in ("one", "one-stage", "straight"):
        ways += [f"mode {name}" for name in ("pipedream-flush", "gpipe") if fits(request, name)]
    if request.depth is not None and fits(replace(request, depth=None)):
        ways.append("parallelism.depth: auto")
    levels = request.cluster.levels
    wider = replace(levels[-1], count=2 * levels[-1].count)
    doubled = replace(request, cluster=replace(request.cluster, levels=(*levels[:-1], wider)))
    if not mode.is_one_stage and fits(doubled):
        ways.append(f"twice as many workers, {2 * request.cluster.num_workers}, for more stages")
    size = request.minibatch_size
    weights = least_memory(Estimator(replace(request, profile=_without_activations(request.profile)), estimator.name))
    if weights <= limit:
        ways.append(f"a minibatch smaller than {size}" if size > 1 else "a smaller minibatch")
        alone = ""
    else:
        ways.append("devices with more memory, or fewer parameters")
        alone = f" (weights, gradients and optimizer state alone {num_bytes(weights)})"
    return (
        f"no plan of mode {estimator.name} fits: the leanest{' found' * (mode.chunks > 1)} needs {num_bytes(needed)} "
        f"on a worker{alone}, {num_bytes(needed - limit)} more than the {num_bytes(limit)} of "
        f"{a_or_an(request.cluster.device)}; "
        f"what would help: {', or '.join(ways)}"
    )


def lacks_places(estimator: Estimator) -> bool:
    """Return whether there are too few workers or places to cut for a mode with several stages per worker."""
    return estimator.mode.chunks > 1 and math.isinf(least_memory(estimator))


def _too_few_places(estimator: Estimator) -> str:
    """Say that there are too few workers, or places to cut, for several stages per worker."""
    workers, stages = estimator.request.cluster.num_workers, len(estimator.work.states) - 1
    problem = (
        f"no plan of mode {estimator.name}: {estimator.mode.chunks} stages on each of at least 2 workers are needed; "
        f"there {'is' if workers == 1 else 'are'} {workers:,}, and the model can be cut into {stages:,} stages at most"
    )
    return too_few_places(estimator.work.states.rows, problem, ties=estimator.work.states.parts_ties)


def _without_activations(profile: Profile) -> Profile:
    """Return a profile whose layers neither save nor send anything: bytes independent of the minibatch remain."""
    tensors = ("saved_with", "saved_storages", "output_storages", "input_storages", "output_parts")
    nothing: dict[str, Any] = dict.fromkeys(tensors, ())
    nothing |= dict.fromkeys(("saved_bytes", "output_bytes", "gradient_bytes"), 0)
    layers = {size: tuple(replace(row, **nothing) for row in rows) for size, rows in profile.layers.items()}
    return replace(profile, layers=layers, lengths=())


def _may_swap(estimator: Estimator) -> bool:
    """Return whether swapping is possible, and some layer doesn't swap yet."""
    several = not estimator.mode.is_one_stage and estimator.mode.backward != SPLIT
    return several and estimator.request.cluster.pcie_bytes_per_s is not None and {*estimator.memory_policies} != {SWAP}


def least_memory(estimator: Estimator) -> float:
    """Return the bytes per worker of a mode's leanest plan, within 0.1%."""
    if estimator.mode.chunks > 1:
        every = Searches(estimator, lambda _search: None).candidates(None)
        return min((found.memory_bytes for found in every), default=math.inf)
    # The more replicas share a sharded stage, the less each of them holds.
    replicas = estimator.request.cluster.num_workers if estimator.mode.shape == "one-stage" else 1
    whole = estimator.estimate("", (SearchStage(0, len(estimator.work.states) - 1, replicas),)).memory_bytes
    if estimator.mode.is_one_stage:
        return whole
    straight = StraightPlans(estimator.work, estimator.request.cluster.num_workers, estimator.memory(math.inf))

    def fits(limit_bytes: float) -> bool:
        rule = estimator.memory(limit_bytes)
        if estimator.mode.weight_sets != 1 and estimator.request.depth is None:
            rule = replace(rule, depth_at_most=1)
        if not order_of(estimator.mode.order).splits:
            return straight.fits(estimator.at_width(rule, 1))
        # Every stage has as many units in flight as there are stages.
        widths = ([1] * length for length in range(estimator.positions_at(1), 0, -1))
        in_flight = ((len(each), estimator.in_flight(each, 0, estimator.depth_of(each))) for each in widths)
        return any(straight.fits(replace(rule, in_flight=units), length) for length, units in in_flight)

    low, high = 0.0, 64 * whole + 1
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


Best = Callable[[Request], PlanEstimate]  # the best plan of a mode under a request; raises a PlanError if none fits


def best_choice(estimator: Estimator, best: Best) -> PlanEstimate:
    """Return the best plan of a mode; where memory binds, of all rows of `open_rows`, too.

    Args:
        estimator: of the mode and its request.
        best: returns the best plan for exactly the row of a request, without choosing.

    Raises:
        PlanError: nothing fits; says what the mode's own row needs.
    """
    found = {estimator.mode: _tried(best, estimator.request)}
    own = found[estimator.mode]
    rows = [] if isinstance(own, PlanError) and lacks_places(estimator) else [*open_rows(estimator)]
    closed = replace(estimator.request, may_shard=(), may_recompute=False)
    if rows and (isinstance(own, PlanError) or (not _fits_whole(estimator) and _binds(estimator, best, closed, own))):
        found |= {row: _tried(best, replace(closed, row=row)) for row in rows}
    plans = {row: each for row, each in found.items() if isinstance(each, PlanEstimate)}
    if isinstance(own, PlanError) and not plans:
        if not rows:
            raise own
        raise PlanError(f"{own}; with {MemoryChoice(rows[-1].shard, rows[-1].recompute)} none fits either")
    chosen = min(plans, key=lambda row: plans[row].minibatch_s)
    if len(found) == 1:
        return plans[chosen]
    ordered = sorted(found, key=lambda row: row != chosen)  # stable: the others keep their order
    times_s = {row: each.minibatch_s for row, each in plans.items()}
    tried = tuple(MemoryChoice(row.shard, row.recompute, times_s.get(row)) for row in ordered)
    made = replace(plans[chosen], choices=tried)
    if chosen == estimator.mode:
        return made
    shard = None if chosen.shard == estimator.mode.shard else chosen.shard
    return replace(made, plan=replace(made.plan, shard=shard), found_by=f"{made.found_by}, with {tried[0]}")


def open_rows(estimator: Estimator) -> Iterator[Mode]:
    """Yield the other rows that plans may use: the mode's with shards, with recomputation, or with both.

    None under the papers' cost models, which have no shards. Straight plans have no replicas to shard.
    """
    request, mode = estimator.request, estimator.mode
    if request.cluster.memory_bytes is None or not request.model.has_ports or mode.is_one_stage:
        return
    shards, again = [mode.shard], [mode.recompute]
    if estimator.name in request.may_shard and not mode.is_sharded and mode.shape != "straight":
        shards.append(OPTIMIZER)
    if request.may_recompute and not mode.recompute:
        again.append(True)
    rows = (replace(mode, shard=shard, recompute=recompute) for recompute in again for shard in shards)
    yield from (row for row in rows if row != mode)


def _fits_whole(estimator: Estimator) -> bool:
    """Return whether one device holds twice the whole model, with as many units in flight as any stage can have.

    Then memory never binds, and no search is needed to know it. Twice, because a stage also has buffers for what it
    sends.
    """
    rule, states = estimator.memory(estimator.memory_limit_bytes), estimator.work.states
    deepest = rule.in_flight or max(1 + estimator.request.cluster.num_workers, estimator.request.depth or 1)
    return 2 * rule.num_bytes(states, 0, len(states) - 1, deepest) <= rule.limit_bytes


def _binds(estimator: Estimator, best: Best, closed: Request, own: PlanEstimate) -> bool:
    """Return whether memory binds: some plan that doesn't fit is faster than the best that does."""
    fastest = best(replace(closed, cluster=replace(estimator.request.cluster, memory_bytes=None)))
    return (
        fastest.minibatch_s < own.minibatch_s
        and fastest.memory_bytes > estimator.memory(estimator.memory_limit_bytes).limit_bytes
    )


def _tried(best: Best, request: Request) -> PlanEstimate | PlanError:
    try:
        return best(request)
    except PlanError as error:
        return error
