"""What the number of minibatches in flight allows at most, however wide the stages are: a bound per pair of stages.

With d minibatches in flight a replica starts the forward of minibatch k only after minibatch k - d has come back to it
(and, where gradients are summed, after all replicas of its stage have updated). Coming back takes a forward and a
backward on every stage down to some later one, and the transfers there and back. So the stage finishes at most d
minibatches in that time; of those d, the ones that wait at the later stage for their turn don't count, because another
minibatch is served there meanwhile. The bound of a stage with itself is its own round: forward, backward, update.
However many are in flight, a connection carries one message at a time, and a worker that copies from and to its host
does nothing else.

Differs: PipeDream (SOSP'19) section 3.2 sets d to NOAM and takes that to be enough. It is where transfers take no time
and every stage has one replica. Otherwise NOAM leaves no minibatch to compute while another is on its way, or while the
replicas of a round pass a narrower stage one after the other. Waiting for ports comes on top; only the simulator knows
about that.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipebench.cluster import Cluster
from pipebench.planner.cost_models import CostModel, StageGrid, UnitWork
from pipebench.planner.flat import SearchStage
from pipebench.planner.placement_costs import LONGEST_CYCLE, spanned, stage_level
from pipebench.schedule.orders import ONE_F_ONE_B
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.simulate.costs import as_values


class _Way(NamedTuple):
    """Messages between a stage and the next.

    Attributes:
        seconds: of a minibatch's there and back, copies at both ends included.
        pace_s: per minibatch, of the connections that they go over in turn.
        copy_s: of a minibatch's copies at one of its ends.
        returns: whether something comes back.
    """

    seconds: float
    pace_s: float
    copy_s: float
    returns: bool


def loops_s(
    work: UnitWork,
    model: CostModel,
    cluster: Cluster,
    stages: Sequence[SearchStage],
    devices: Sequence[Sequence[int]],
    depth: int,
    *,
    relay: bool = False,
) -> list[float]:
    """Return the seconds per minibatch of the slowest loop from each stage on, under 1F1B without flushes.

    Args:
        work: the model.
        model: the cost model, one that overlaps computing and communication.
        cluster: the levels of links.
        stages: the plan.
        devices: of every stage's replicas.
        depth: minibatches in flight per input-stage replica.
        relay: whether what skips stages goes through all of those between.
    """
    replicas = tuple(stage.replicas for stage in stages)
    depths = Pipeline(replicas, chain(len(stages)), ONE_F_ONE_B, False, depth).warmups
    states = work.states
    both = states.forward_s + states.backward_s
    ways = [_way(work, cluster, stages, devices, index, relay=relay) for index in range(len(stages) - 1)]
    slowest = []
    for first, upper in enumerate(stages):
        grid = StageGrid(work, np.array([upper.start]), upper.stop)
        level = stage_level(cluster, model, devices, first)
        own = model.round(grid, level)
        loop_s = float(own.seconds(float(upper.replicas)).flat[0]) * upper.replicas
        sums = upper.replicas > 1 and float(grid.sums(states.parameter_bytes).flat[0]) > 0
        around = ways[max(0, first - 1) : first + 1]
        busy_s = float(own.base.flat[0]) + sum(way.copy_s for way in around)
        worst = max(max(loop_s, busy_s) / upper.replicas, *(way.pace_s for way in around), 0.0)
        for last in range(first + 1, len(stages)):
            way, lower = ways[last - 1], stages[last]
            if not way.returns:
                break
            loop_s += way.seconds + float(both[lower.stop] - both[lower.start])
            waiting = (depths[last] - 1) * lower.replicas
            if sums:  # a round goes on when its last minibatch is back
                waiting = -(-waiting // upper.replicas) * upper.replicas
            worst = max(worst, loop_s / (depths[first] * upper.replicas - waiting))
        slowest.append(worst)
    return slowest


def _way(
    work: UnitWork,
    cluster: Cluster,
    stages: Sequence[SearchStage],
    devices: Sequence[Sequence[int]],
    index: int,
    *,
    relay: bool,
) -> _Way:
    """Return what the messages between a stage and the next come to, over the outermost level that some cross."""
    states, last = work.states, len(stages) - 1
    start, stop = (0, stages[last].stop) if relay else (stages[index].start, stages[index + 1].stop)
    before, after = states.layers(start, stages[index].stop), states.layers(stages[index + 1].start, stop)
    read = {value for reader in after for value in states.rows[reader].reads}
    if stop == len(states) - 1:
        read.update(states.rows[-1].reads)  # the loss belongs to the last stage
    crossing = [states.rows[value] for value in before if value in read]
    sent, returned = sum(row.output_bytes for row in crossing), sum(row.gradient_bytes for row in crossing)
    own, others = devices[index], devices[index + 1]
    cycle = math.lcm(len(own), len(others))
    pairs = {(own[k % len(own)], others[k % len(others)]) for k in range(min(cycle, LONGEST_CYCLE))}
    level = cluster.levels[max(spanned(cluster, pair) for pair in pairs)]
    rate = level.message_rate(as_values([row.output_bytes for row in crossing]))
    copy_s = level.copy_s(sent + returned)
    there_and_back_s = (sent + returned) / rate + 2 * level.latency_s + 2 * copy_s
    return _Way(there_and_back_s, max(sent, returned) / rate / cycle, copy_s, returned > 0)
