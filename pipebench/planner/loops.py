"""Lower bounds on a stage's time from the minibatches in flight: a minibatch's round trip over d.

With d in flight a replica starts the forward of minibatch k only after minibatch k - d has returned (and, if gradients
are summed, all replicas have updated). The round trip takes a forward, a backward and transfers on every stage down to
some later one, so at most d minibatches finish in that time, less those that queue at the later stage. Connections
carry one message at a time, and a worker that copies to or from its host does nothing else.

Differs: PipeDream (SOSP'19) section 3.2 takes NOAM for enough. That holds if transfers are free and stages have one
replica. Contention for ports comes on top; only the simulator models it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipebench.cluster import Cluster
from pipebench.planner.cost_models import CostModel, StageGrid, UnitWork
from pipebench.planner.placement_costs import Sketch, cycle_pairs, spanned, stage_level
from pipebench.schedule.orders import ONE_F_ONE_B
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.simulate.costs import as_values


class _RoundTrip(NamedTuple):
    """Messages between a stage and the next."""

    seconds: float  # of one minibatch there and back, with copies at both ends
    pace_s: float  # per minibatch, of the busiest connection
    copy_s: float  # of one minibatch's copies at one end
    returns: bool  # whether gradients come back


def loops_s(work: UnitWork, model: CostModel, cluster: Cluster, sketch: Sketch, *, relay: bool = False) -> list[float]:
    """Return, per stage, the seconds per minibatch of its slowest round trip, under 1F1B without flushes.

    For a cost model that overlaps computing and communication. With `relay`, values that skip stages pass through those
    between.
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

    `round_s` is a round of the first stage; `steps_s` are, per later stage, its forward and backward and the transfers
    to it and back, None: none come back. `replicas` and `depths`, the minibatches in flight per replica, are of all the
    stages; `sums`: whether the first stage sums gradients, so that a round waits for its last minibatch.
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
    """Return the messages between stage `index` and the next, at the outermost level that some of them cross."""
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
