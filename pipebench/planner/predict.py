"""A plan's steady state in the simulator under the cost model that it was made with, and its payload.

The payload does not depend on the cost model, which may charge for more bytes than cross the cuts.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.model.plan import Plan, tied_parameters
from pipebench.model.sampling import Sampler
from pipebench.planner.flat import SearchStage
from pipebench.planner.plans import PlanEstimate, Request, StageTime
from pipebench.planner.states import States
from pipebench.profile.model import LayerProfile, Profile, in_order
from pipebench.profile.tensor import unit_bytes
from pipebench.schedule.modes import AUTO, RECOMPUTE, SWAP, Mode
from pipebench.schedule.operations import ACTIVATION, GRADIENT
from pipebench.schedule.pipeline import Edge, Pipeline, noam
from pipebench.schedule.syncs import ALL_GATHER, PARAMETERS, REDUCE_SCATTER, SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES, update_costs
from pipebench.simulate.costs import Costs, loading_stages, stage_costs
from pipebench.simulate.meter import COMPUTED, Listener, Meter
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.steady import SegmentTotals, simulate_all, simulate_segment
from pipebench.simulate.sums import faster_sums
from pipebench.simulate.timeline import TENSOR

FILL_ROUNDS = 4  # updates of every stage, at least, before the steady state is measured
_DEEP_ROUNDS = 8  # times as many, at most, beyond NOAM, where queues take long to fill
# Replicas that don't wait for each other push at the same time at first, and drift apart slowly. One's minibatch takes
# longer to simulate the more they are, as all share the server's port: so many minibatches times replicas take seconds
_MOST_DRIFTING = 1 << 14
_SETTLED = 1e-4  # relative change of a prediction below which it isn't refined


@dataclass(frozen=True)
class PlannedWorkload:
    """A plan as the simulator runs it."""

    pipeline: Pipeline
    costs: Costs
    cluster: Cluster
    devices: tuple[int, ...]
    sampler: Sampler


def arrange(states: States, stages: Sequence[SearchStage]) -> tuple[tuple[int, ...], list[int]]:
    """Return the layers in the order of a plan's stages, and where its later stages begin in that order.

    Layers outside all states (model inputs, unread results) are left out.
    """
    order: list[int] = []
    starts = []
    for stage in stages:
        starts.append(len(order))
        order += states.layers(stage.start, stage.stop)
    return tuple(order), starts[1:]


def arranged(profile: Profile, order: Sequence[int]) -> Profile:
    """Return a profile with its layers in another order, the loss last."""
    if all(len(rows) - 1 == len(order) for rows in profile.layers.values()) and list(order) == sorted(order):
        return profile
    return replace(profile, layers={n: in_order(rows, [*order, len(rows) - 1]) for n, rows in profile.layers.items()})


def with_sums(mode: Mode, cluster: Cluster, plan: Plan) -> Mode:
    """Return a mode with the order in which a plan's replicas sum, if the mode leaves that to the cluster."""
    if mode.sums != AUTO:
        return mode
    return replace(mode, sums=faster_sums(cluster.for_stages(len(plan.positions)), plan.devices))


def make_pipeline(
    plan: Plan,
    rows: Sequence[LayerProfile],
    mode: Mode,
    *,
    microbatches: int = 1,
    accumulate: int | None = None,
    shares_norm: bool = False,
) -> Pipeline:
    """Return the shape of a plan's pipeline in a mode.

    Args:
        plan: stages and their replicas.
        rows: the plan's layers, at any size.
        mode: the mode's row, which says in which order replicas sum (`with_sums`).
        microbatches: per minibatch.
        accumulate: blocks of minibatches per update; None for the mode's.
        shares_norm: whether updates need the norm of all gradients, on which stages and sharded replicas agree before
            an update in modes that flush.

    Raises:
        PlanError: an update covers fewer minibatches than the mode needs.
    """
    accumulate = accumulate or mode.accumulate or plan.depth
    shares_norm = shares_norm and mode.flush and (len(plan.stages) > 1 or mode.is_sharded)
    if WEIGHT_POLICIES[mode.weights].accumulates and accumulate < plan.depth:
        raise PlanError(
            f"parallelism.accumulate: got {accumulate}, weights {mode.weights} need at least as many minibatches per "
            f"update as are in flight, {plan.depth}"
        )
    pipeline = Pipeline(
        plan.replicas, (), mode.order, mode.flush, plan.depth, microbatches, accumulate, (), shares_norm,
        weights=mode.weights, chunks=plan.chunks, sync=mode.sync, backward=mode.backward,
        sums=mode.sums, shard=mode.shard, reshards=mode.reshard_after_forward,
    )  # fmt: skip
    return pipeline_under(pipeline, plan, rows)


def pipeline_under(pipeline: Pipeline, plan: Plan, rows: Sequence[LayerProfile]) -> Pipeline:
    """Return a pipeline with a plan's edges, loading stages, swapping stages and ties; `rows` are the plan's layers."""
    edges = tuple(
        Edge(source, target, any(rows[value].gradient_bytes for value in values))
        for (source, target), values in plan.crossings.items()
    )
    loads = loading_stages(plan, rows)
    swaps = tuple(index for index, stage in enumerate(plan.stages) if SWAP in stage.memory)
    return replace(pipeline, edges=edges, loads=loads, swaps=swaps, ties=tuple(tied_parameters(rows, plan)))


def planned_workload(
    found: PlanEstimate, mode: Mode, profile: Profile, request: Request
) -> tuple[PlannedWorkload, int]:
    """Return a plan as the simulator runs it, and the number of minibatches to its steady state.

    `profile` has the layers in the plan's order.
    """
    plan, rows = found.plan, profile.rows
    cluster = request.cluster.for_stages(len(plan.positions))
    mode = with_sums(mode, cluster, plan)
    pipeline = make_pipeline(
        plan, rows, mode, microbatches=found.microbatches, accumulate=found.accumulate, shares_norm=request.shares_norm
    )
    costs = stage_costs(profile, plan, update_costs(pipeline), sharded=mode.is_sharded)
    # A flush empties the pipeline, so the second period is like every later one.
    rounds = 2 if pipeline.flushes else FILL_ROUNDS * max(2, max(pipeline.warmups))
    count = pipeline.period * rounds
    sampler = Sampler(2 * _DEEP_ROUNDS * count * request.minibatch_size, request.minibatch_size, 0)
    costs, cluster = request.model.simulated(costs, plan.replicas), request.model.links(cluster)
    return PlannedWorkload(pipeline, costs, cluster, plan.devices, sampler), count


def predict(workload: PlannedWorkload, count: int, hopeless_s: float = math.inf) -> float:
    """Return the seconds per minibatch in the steady state, reached after `count` minibatches.

    Infinity if the first `count` of them, filling and draining included, take more than `hopeless_s` each.
    """
    shorter = simulate_segment(workload, count, until_s=hopeless_s * count)
    if math.isinf(shorter.end_s):
        return shorter.end_s
    longer = _twice(workload, shorter, count)
    found, pipeline = (longer.end_s - shorter.end_s) / count, workload.pipeline
    most = count
    if pipeline.depth > noam(pipeline.replicas):
        most = _DEEP_ROUNDS * count
    elif not SYNCS[pipeline.sync].waits:
        most = min(_DEEP_ROUNDS * count, _MOST_DRIFTING // pipeline.num_workers)
    while count < most:
        count, shorter, before = 2 * count, longer, found
        longer = _twice(workload, shorter, count)
        found = (longer.end_s - shorter.end_s) / count
        if math.isclose(found, before, rel_tol=_SETTLED):
            break
    return found


def _twice(workload: PlannedWorkload, segment: SegmentTotals, count: int) -> SegmentTotals:
    """Return a segment twice as long as one of `count` minibatches."""
    return segment.longer(count) or simulate_segment(workload, 2 * count)


class _TimeShares(Listener):
    """Records when workers compute and when they wait for bytes."""

    def __init__(self) -> None:
        self.events: list[TimelineEvent] = []

    def event(self, event: TimelineEvent) -> None:
        """Record an event with a duration; the time of a transfer is in its receiver's wait."""
        if event.end_s > event.start_s:
            self.events.append(event)

    def shares(self, pipeline: Pipeline, since_s: float, until_s: float) -> Iterator[StageTime]:
        """Yield every stage's shares of the time between two moments."""
        busy: Counter[tuple[int, int]] = Counter()  # seconds by worker and stage
        stalled: Counter[tuple[int, int]] = Counter()
        for start_s, end_s, worker, instruction, stall_s in self.events:
            inside = max(0.0, min(end_s, until_s) - max(start_s, since_s))
            counted, value_s = (busy, inside) if instruction.op in COMPUTED else (stalled, min(inside, stall_s))
            counted[worker, instruction.stage] += value_s  # type: ignore[assignment] # Counter is typed for int
        for stage in range(pipeline.num_stages):
            own = pipeline.places[stage]
            whole_s = len(own) * (until_s - since_s)
            computing, transfers = (sum(each[worker, stage] for worker in own) / whole_s for each in (busy, stalled))
            others = sum(each[key] for each in (busy, stalled) for key in each if key[0] in own and key[1] != stage)
            yield StageTime(computing, transfers, max(0.0, 1.0 - computing - transfers - others / whole_s))


def stage_times(workload: PlannedWorkload, count: int) -> tuple[StageTime, ...]:
    """Return how every stage's workers spend their time in the steady state, reached after `count` minibatches."""
    spent = _TimeShares()
    end_s = simulate_all(workload, 2 * count, Meter(workload.pipeline, spent)).end_s
    # Every flush is alike; elsewhere the first and the last third hold fill and drain.
    since_s, until_s = (0.0, end_s) if workload.pipeline.flushes else (end_s / 3, 2 * end_s / 3)
    return tuple(spent.shares(workload.pipeline, since_s, until_s))


def payload(
    rows: Sequence[LayerProfile], plan: Plan, mode: Mode, units: int, accumulate: int, slices: int = 1
) -> dict[str, float]:
    """Return the payload in bytes per minibatch by kind, in the steady state.

    Args:
        rows: the layers in the plan's order, the loss last, at the size of a unit.
        plan: stages and their replicas.
        mode: the mode's row.
        units: microbatches per minibatch.
        accumulate: minibatches of each replica per update; with a flush, blocks of the replicas' least common multiple.
        slices: devices per worker.
    """
    devices = [stage.devices for stage in plan.stages]
    sent = [value for (s, t), values in plan.crossings.items() for value in values if devices[s] != devices[t]]
    summed, gathered = _sum_bytes(rows, plan, mode, units, accumulate)
    policies = (*plan.memory, plan.memory[-1])  # the loss goes with the last layer
    again = [index for index, policy in enumerate(policies) if policy == RECOMPUTE]
    of_one = {
        **({ALL_GATHER: gathered} if mode.is_sharded else {}),
        ACTIVATION: units * float(sum(rows[value].output_bytes for value in sent)),
        GRADIENT: units * float(sum(rows[value].gradient_bytes for value in sent)),
        REDUCE_SCATTER if mode.is_sharded else SYNCS[mode.sync].algorithm: summed,
    }
    tensor = {TENSOR: units * float(unit_bytes(rows, slices, again))} if slices > 1 else {}
    return {kind: slices * num_bytes for kind, num_bytes in of_one.items()} | tensor


def _sum_bytes(
    rows: Sequence[LayerProfile], plan: Plan, mode: Mode, units: int, accumulate: int
) -> tuple[float, float]:
    """Return the bytes per minibatch that replicas send to sum gradients, and to gather shards; see `payload`."""
    summed = gathered = 0.0
    tied = {} if mode.is_sharded else tied_parameters(rows, plan)  # sharded copies are summed like other weights
    apart = {name for names in tied.values() for name in names}
    for stage in plan.stages:
        own = rows[stage.start : stage.stop]
        weights = {n: size for row in own for n, size in row.parameter_sizes.items() if n not in apart}
        # The m replicas send 2 (m-1) |w| per update, in a ring or to servers; half of it to scatter or to gather.
        minibatches = accumulate * (math.lcm(*plan.replicas) if mode.flush else stage.replicas)
        crossed = (stage.replicas - 1) * sum(weights.values())
        summed += (1 if mode.is_sharded else 2) * crossed / minibatches
        if mode.shard == PARAMETERS:  # for every unit of each replica
            gathered += (1 + mode.reshard_after_forward) * crossed * units / stage.replicas
        elif mode.is_sharded:
            gathered += crossed / minibatches
    if tied:  # the stages of a tie update after the same minibatches, so `minibatches` is that of any stage
        sizes = {name: size for row in rows for name, size in row.parameter_sizes.items()}
        for stages, names in tied.items():
            copies = len({device for index in stages for device in plan.stages[index].devices})  # one per worker
            summed += 2 * (copies - 1) * sum(sizes[name] for name in names) / minibatches
    return summed, gathered
