"""Costs of a plan on a cluster of several levels, with its workers on given devices.

Flat plans placed in order along the devices include some that the paper's recurrence can't express, such as 15-1 on 4
servers of 4 (PipeDream, SOSP'19, Table 1). A stage sums its gradients at the slowest level that its replicas span.
Under a cost model with ports, every component's port carries what its workers send.

With d minibatches in flight, a replica starts the forward of minibatch k only after minibatch k - d has returned and,
if gradients are summed, all replicas have updated. The round trip of a minibatch to a later stage takes a forward, a
backward and the transfers of every stage on the way. At most d minibatches finish in that time, less those that queue
at the later stage. So a stage's time per minibatch is at least the round trip over d. Connections carry one message at
a time, and a worker that copies to or from its host does nothing else.

Differs: PipeDream (SOSP'19) section 3.2 assumes that NOAM minibatches keep all stages busy. That holds if transfers are
free and stages have one replica. Contention for ports adds to the round trip; only the simulator models it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import CostModel, StageGrid, StageTerms, UnitWork
from pipebench.planner.flat import SearchStage
from pipebench.schedule.orders import ONE_F_ONE_B
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.simulate.costs import as_values

LONGEST_CYCLE = 1 << 12  # minibatches enumerated to pair senders and receivers


class Sketch(NamedTuple):
    """A plan as searches describe it."""

    stages: tuple[SearchStage, ...]
    devices: tuple[tuple[int, ...], ...]  # of every stage's replicas; empty: any placement
    depth: int

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(stage.replicas for stage in self.stages)


def along(replicas: Sequence[int]) -> list[range]:
    """Return the devices of every stage's replicas, in order."""
    return [range(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(replicas)])]


def spanned(cluster: Cluster, devices: Sequence[int]) -> int:
    """Return the index of the innermost level with one component that holds all these devices; 0 for one device."""
    return cluster.level_between(min(devices), max(devices))


def stage_level(cluster: Cluster, model: CostModel, devices: Sequence[Sequence[int]], index: int) -> Level:
    """Return the level whose links price a stage.

    It is the innermost that joins the stage's replicas or, under a model without ports, also those of its neighbours.
    """
    around = devices[index : index + 1] if model.has_ports else devices[max(0, index - 1) : index + 2]
    return cluster.levels[spanned(cluster, [device for group in around for device in group])]


def cut_levels(cluster: Cluster, devices: Sequence[Sequence[int]], index: int) -> tuple[Level, Level]:
    """Return the levels to the stage before and to the stage after."""
    pairs = (devices[max(0, index - 1) : index + 1], devices[index : index + 2])
    before, after = (cluster.levels[spanned(cluster, [d for group in pair for d in group])] for pair in pairs)
    return before, after


def cycle_pairs(own: Sequence[int], others: Sequence[int]) -> list[tuple[int, int]]:
    """Return the devices in two stages that every minibatch of a cycle passes, of at most LONGEST_CYCLE minibatches."""
    cycle = min(math.lcm(len(own), len(others)), LONGEST_CYCLE)
    return [(own[k % len(own)], others[k % len(others)]) for k in range(cycle)]


def placed_s(
    work: UnitWork,
    model: CostModel,
    cluster: Cluster,
    stages: Sequence[SearchStage],
    devices: Sequence[Sequence[int]],
    *,
    ways: bool = True,
) -> tuple[list[float], float]:
    """Return the seconds per minibatch of every stage, and of the busiest port between components.

    Args:
        work: the model at the size of a unit.
        model: the cost model.
        cluster: the links.
        stages: the plan's.
        devices: of every stage's replicas.
        ways: whether to include rounds and transfers to the stage before; not if `loops_s` is added.
    """
    seconds = []
    for index, stage in enumerate(stages):
        # Gradients are summed among the replicas; values may cross outer levels.
        level = cluster.levels[spanned(cluster, devices[index])]
        grid = StageGrid(work, np.array([stage.start]), stage.stop)
        terms = model.terms(grid, level, first=stage.start == 0) if ways else StageTerms(model.paces(grid, level))
        own_s = float(terms.seconds(float(stage.replicas)).flat[0])
        seconds.append(max(own_s, *model.cuts_s(work, *cut_levels(cluster, devices, index), *stage)))
    ports = [0.0]
    if model.has_ports:
        size = 1
        for below, level in zip(cluster.levels, cluster.levels[1:], strict=False):
            size *= below.count
            carried = _port_bytes(work, stages, devices, (size, size * level.count))
            ports.append(max(carried.values(), default=0.0) / level.goodput_bytes_per_s)
    return seconds, max(ports)


def _port_bytes(
    work: UnitWork, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]], sizes: tuple[int, int]
) -> dict[tuple[int, bool], float]:
    """Return the payload per minibatch of a level's ports, by (component of the level below, whether it is sent).

    `sizes` are the numbers of devices of a component of the level below, and of a component of the level. Payload
    between components of the level crosses an outer level instead.
    """
    states = work.states
    load: dict[tuple[int, bool], float] = {}
    size, around_size = sizes

    def add(sender: int, receiver: int, num_bytes: float) -> None:
        if sender // size != receiver // size and sender // around_size == receiver // around_size:
            for key in ((sender // size, True), (receiver // size, False)):
                load[key] = load.get(key, 0.0) + num_bytes

    for stage, own in zip(stages, devices, strict=True):
        members = sorted({device // size: device for device in own}.values())  # one of every component
        weights = states.weights(stage.start, stage.stop)
        around = 2 * (stage.replicas - 1) / stage.replicas * weights / (stage.replicas * work.rounds)
        for sender, receiver in zip(members, [*members[1:], members[0]], strict=True):
            add(sender, receiver, around)
    for stage, own, others in zip(stages, devices, devices[1:], strict=False):
        pairs = cycle_pairs(own, others)
        for one, other in pairs:
            add(one, other, states.sent_bytes[stage.stop] / len(pairs))
            add(other, one, states.returned_bytes[stage.stop] / len(pairs))
    return load


class _RoundTrip(NamedTuple):
    """Costs of the messages between a stage and the next, in seconds."""

    seconds: float  # of one minibatch there and back, with host copies at both ends
    pace_s: float  # per minibatch, on the busiest connection
    copy_s: float  # of one minibatch's host copies at one end
    returns: bool  # whether gradients come back


def loops_s(work: UnitWork, model: CostModel, cluster: Cluster, sketch: Sketch, *, relay: bool = False) -> list[float]:
    """Return, per stage, the seconds per minibatch of its slowest round trip, under 1F1B without flushes.

    For a cost model in which computing and communication overlap. With `relay`, values that skip stages pass through
    the stages between.
    """
    stages, replicas, states = sketch.stages, sketch.replicas, work.states
    depths = warmups(replicas, sketch.depth)
    both = states.forward_s + states.backward_s
    trips = [_round_trip(work, cluster, sketch, index, relay=relay) for index in range(len(stages) - 1)]
    steps_s = [
        trip.seconds + float(both[lower.stop] - both[lower.start]) if trip.returns else None
        for trip, lower in zip(trips, stages[1:], strict=True)
    ]
    slowest = []
    for first, upper in enumerate(stages):
        grid = StageGrid(work, np.array([upper.start]), upper.stop)
        own = model.round(grid, stage_level(cluster, model, sketch.devices, first))
        round_s = float(own.seconds(float(upper.replicas)).flat[0]) * upper.replicas
        sums = upper.replicas > 1 and float(grid.weights.flat[0]) > 0
        around = trips[max(0, first - 1) : first + 1]
        busy_s = float(own.base.flat[0]) + sum(trip.copy_s for trip in around)
        trips_s = round_trips_s(round_s, steps_s[first:], replicas[first:], depths[first:], sums=sums)
        slowest.append(max(max(round_s, busy_s) / upper.replicas, *(trip.pace_s for trip in around), 0.0, *trips_s))
    return slowest


def warmups(replicas: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Return the minibatches in flight per replica of every stage under 1F1B without flushes."""
    return Pipeline(replicas, chain(len(replicas)), ONE_F_ONE_B, False, depth).warmups


def round_trips_s(
    round_s: float, steps_s: Sequence[float | None], replicas: Sequence[int], depths: Sequence[int], *, sums: bool
) -> Iterator[float]:
    """Yield the seconds per minibatch of the round trips from the first of some stages to each later one.

    Args:
        round_s: a round of the first stage.
        steps_s: of every later stage, its forward, its backward and the transfers to it and back; None if no gradient
            comes back.
        replicas: of all the stages.
        depths: minibatches in flight per replica, of all the stages.
        sums: whether the first stage sums gradients, so that a round waits for its last minibatch.
    """
    trip_s, m = round_s, replicas[0]
    for step_s, width, depth in zip(steps_s, replicas[1:], depths[1:], strict=True):
        if step_s is None:
            return
        trip_s += step_s
        waiting = (depth - 1) * width
        if sums:
            waiting = -(-waiting // m) * m
        yield trip_s / (depths[0] * m - waiting)


def _round_trip(work: UnitWork, cluster: Cluster, sketch: Sketch, index: int, *, relay: bool) -> _RoundTrip:
    """Return the costs of messages between stage `index` and the next, at the outermost level that any crosses."""
    stages = sketch.stages
    states, last = work.states, len(stages) - 1
    start, stop = (0, stages[last].stop) if relay else (stages[index].start, stages[index + 1].stop)
    before, after = states.layers(start, stages[index].stop), states.layers(stages[index + 1].start, stop)
    read = {value for reader in after for value in states.rows[reader].reads}
    if stop == len(states) - 1:
        read.update(states.rows[-1].reads)  # the loss belongs to the last stage
    crossing = [states.rows[value] for value in before if value in read]
    sent, returned = sum(row.output_bytes for row in crossing), sum(row.gradient_bytes for row in crossing)
    own, others = sketch.devices[index], sketch.devices[index + 1]
    cycle = math.lcm(len(own), len(others))
    level = cluster.levels[max(spanned(cluster, pair) for pair in {*cycle_pairs(own, others)})]
    rate = level.message_rate(as_values([row.output_bytes for row in crossing]))
    copy_s = level.copy_s(sent + returned)
    there_and_back_s = (sent + returned) / rate + 2 * level.latency_s + 2 * copy_s
    return _RoundTrip(there_and_back_s, max(sent, returned) / rate / cycle, copy_s, returned > 0)
