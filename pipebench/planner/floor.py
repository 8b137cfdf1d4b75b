"""Lower bounds on a plan's seconds per minibatch in steady state, to skip simulations that can't give a better plan.

Bottlenecks (`placement_costs`) are sums over states, which are cheap for millions of stages but know no real buckets.
These bounds use the simulator's own inputs. Each of the following takes time:

- a replica's round: forward, backward, the part of the gradient sum after it, update;
- a round trip to a later stage, in which d minibatches are in flight, as in `placement_costs.loops_s`;
- the bytes of a port, and the messages of a connection, one by one;
- the copies of messages to and from its host, during which a worker does nothing else;
- the loading of a worker's minibatches, one by one.

In `reports/planner_regret.md` no simulated time is below them, and most are equal.
"""

import bisect
import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import NamedTuple, Self

import numpy as np

from pipebench.cluster import RING, TWO_LEVEL, Level
from pipebench.model.plan import Plan, StagePlan
from pipebench.planner.cost_models import ring_s
from pipebench.planner.estimates import Estimator
from pipebench.planner.flat import SearchStage
from pipebench.planner.placement_costs import Sketch, cycle_pairs, round_trips_s, warmups
from pipebench.planner.predict import arranged
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.simulate.costs import StageCosts, stage_costs
from pipebench.simulate.network import Network
from pipebench.simulate.sums import ALGORITHMS, Port


class _Crossing(NamedTuple):
    """Bytes forward and back between two stages, and the number of values."""

    sent: int
    returned: int
    values: int


_NOTHING = _Crossing(0, 0, 0)


class Floors:
    """Lower bounds for plans under 1F1B without flushes, whose cuts follow the order of execution."""

    def __init__(self, estimator: Estimator) -> None:
        states = estimator.work.states
        self._cluster = estimator.request.cluster
        self._size = estimator.unit_size
        if estimator.mode.is_sharded:  # reduce-scatter and all-gather always use one ring
            self._cluster = replace(self._cluster, all_reduce=RING)
        order = states.layers(0, len(states) - 1)
        self._profile = arranged(estimator.sizes, order)
        self._memory = tuple(estimator.memory_policies[layer] for layer in order)
        self._relay, self._sharded = estimator.request.relay, estimator.mode.is_sharded
        self._limited = any(
            level.host_copy_bytes_per_s or level.connection_cap_bytes_per_s < math.inf for level in self._cluster.levels
        )
        self._places = [members.bit_count() for members in states.members]  # layers before each state
        self.rows = self._profile.layers[self._size]
        self._stage = cache(self._stage_costs)
        self._crossing = cache(self._values_across)
        self._level = cache(lambda one, other: self._cluster.levels[self._cluster.level_between(one, other)])
        self._sum = cache(self._sum_s)
        # By whether a plan has several stages
        self._networks = [Network(cluster) for cluster in (self._cluster, self._cluster.for_stages(2))]
        self._ports = cache(lambda sender, receiver: self._networks[0].path(sender, receiver)[1:])
        self.warmups = cache(warmups)
        self.alone_s = cache(self._alone_s)

    @classmethod
    def of(cls, estimator: Estimator) -> Self:
        """Return the bounds for the plans of a mode, shared with modes for which they are the same."""
        key = (
            estimator.unit_size, estimator.work.states.members, estimator.memory_policies, estimator.mode.is_sharded,
            estimator.request.relay, estimator.request.cluster,
        )  # fmt: skip
        if key not in estimator.cache.floors:
            estimator.cache.floors[key] = cls(estimator)
        found: Self = estimator.cache.floors[key]
        return found

    def floor_s(self, sketch: Sketch) -> float:
        """Return the lower bound in seconds per minibatch."""
        edges = self._edges(sketch)
        rounds = [self._round_s(sketch, index) for index in range(len(sketch.stages))]
        slowest_s = max(self._rounds_s(sketch, rounds), self._loops_s(sketch, rounds, edges))
        if not sketch.devices:
            return slowest_s
        limits_s = self._limits_s(sketch, edges) if self._limited else 0.0
        return max(slowest_s, self._ports_s(sketch, edges), limits_s)

    def _alone_s(self, stage: SearchStage) -> float:
        """Return a stage's lower bound in any plan, in seconds per minibatch."""
        sketch = Sketch((stage,), (), 1)
        return self._rounds_s(sketch, [self._round_s(sketch, 0)])

    def _stage_costs(self, start: int, stop: int) -> StageCosts:
        first, last = self._places[start], self._places[stop]
        alone = StagePlan(first, last, 1, (0,), self._memory[first:last])
        return stage_costs(self._profile, Plan("", (alone,), 1)).stages[0]

    @cached_property
    def _readers(self) -> list[list[int]]:
        """Layers that read every layer's output, ascending."""
        readers: list[list[int]] = [[] for _ in self.rows]
        for index, row in enumerate(self.rows):
            for source in row.reads:
                readers[source].append(index)
        return readers

    @cached_property
    def _last_reader(self) -> np.ndarray:
        return np.array([readers[-1] if readers else -1 for readers in self._readers])

    def _values_across(self, place: int) -> list[int]:
        """Return the layers before `place` whose output is read from there on."""
        return [int(value) for value in np.flatnonzero(self._last_reader[:place] >= place)]

    def _edges(self, sketch: Sketch) -> dict[tuple[int, int], _Crossing]:
        """Return what crosses by (source stage, target stage)."""
        places = [self._places[stage.start] for stage in sketch.stages] + [len(self.rows)]
        edges: dict[tuple[int, int], _Crossing] = {}
        for target in range(1, len(sketch.stages)):
            start, stop = places[target], places[target + 1]
            for value in self._crossing(start):
                readers = self._readers[value]
                at = bisect.bisect_left(readers, start)
                if self._relay or (at < len(readers) and readers[at] < stop):
                    edge = (target - 1 if self._relay else bisect.bisect_right(places, value) - 1, target)
                    sent, returned, values = edges.get(edge, _NOTHING)
                    row = self.rows[value]
                    edges[edge] = _Crossing(sent + row.output_bytes, returned + row.gradient_bytes, values + 1)
        return edges

    def _round_s(self, sketch: Sketch, index: int) -> float:
        """Return the seconds of one replica's round."""
        start, stop, replicas = sketch.stages[index]
        costs, num_stages = self._stage(start, stop), len(sketch.stages)
        backward_s, end_s = costs.backward_s[self._size], 0.0
        if replicas > 1:
            for bucket in costs.buckets:
                ready_s = bucket.ready * backward_s
                devices = sketch.devices[index] if sketch.devices else None
                end_s = max(end_s, ready_s) + self._sum(num_stages > 1, devices, replicas, bucket.num_bytes)
        return costs.forward_s[self._size] + max(backward_s, end_s) + self._update_s(costs, replicas)

    def _update_s(self, costs: StageCosts, replicas: int) -> float:
        """Return the seconds of an update: of a shard, if the mode is sharded."""
        least_s = min(self._profile.update_floor_s, costs.update_s)
        return least_s + (costs.update_s - least_s) / (replicas if self._sharded else 1)

    def _sum_s(self, has_others: bool, devices: tuple[int, ...] | None, replicas: int, num_bytes: int) -> float:
        """Return the seconds of a stage's all-reduce without other traffic.

        Args:
            has_others: whether its plan has other stages.
            devices: of its replicas; None: a lower bound over all placements.
            replicas: their number.
            num_bytes: of the buffer.
        """
        if devices is not None:
            return self._networks[has_others].alone_s(ALL_REDUCE, tuple(sorted(devices)), num_bytes)
        levels = (self._cluster.for_stages(2) if has_others else self._cluster.at_best).levels
        if self._cluster.all_reduce == TWO_LEVEL:
            return _least_in_two_levels_s(levels, replicas, num_bytes)
        # The ring has a link of some level whose components together have room for all replicas.
        counts = itertools.accumulate((level.count for level in levels), operator.mul)
        rooms = [level for level, count in zip(levels, counts, strict=True) if count >= replicas]
        least_s = min(level.latency_s for level in levels)
        return min(ring_s([replace(level, latency_s=least_s)] * replicas, num_bytes) for level in rooms)

    def _rounds_s(self, sketch: Sketch, rounds: Sequence[float]) -> float:
        """Return the seconds per minibatch of the slowest stage's rounds, or of its loading."""
        loads = (self._stage(start, stop).load_s[self._size] for start, stop, _ in sketch.stages)
        return max(max(round_s, load_s) / m for round_s, load_s, m in zip(rounds, loads, sketch.replicas, strict=True))

    def _loops_s(self, sketch: Sketch, rounds: Sequence[float], edges: dict[tuple[int, int], _Crossing]) -> float:
        """Return the seconds per minibatch of the slowest round trip."""
        slowest_s, steps_s = 0.0, []
        for index, (start, stop, _) in enumerate(sketch.stages[1:]):
            way_s, costs = self._way_s(sketch, index, edges.get((index, index + 1))), self._stage(start, stop)
            seconds = costs.forward_s[self._size], costs.backward_s[self._size]
            steps_s.append(None if way_s is None else way_s + seconds[0] + seconds[1])
        replicas, depths = sketch.replicas, self.warmups(sketch.replicas, sketch.depth)
        for first, m in enumerate(replicas):
            sums = m > 1 and bool(self._stage(*sketch.stages[first][:2]).buckets)
            trips_s = round_trips_s(rounds[first], steps_s[first:], replicas[first:], depths[first:], sums=sums)
            slowest_s = max([slowest_s, *trips_s])
        return slowest_s

    def _way_s(self, sketch: Sketch, index: int, crossing: _Crossing | None) -> float | None:
        """Return the seconds from a stage to the next and back over their best link; None if no gradient returns."""
        if crossing is None or crossing.returned == 0:
            return None
        pairs = cycle_pairs(*sketch.devices[index : index + 2]) if sketch.devices else []
        levels = {self._level(*pair) for pair in pairs} or {*self._cluster.levels}
        num_bytes = crossing.sent + crossing.returned
        return min(
            num_bytes / level.message_rate(crossing.values) + 2 * level.latency_s + 2 * level.copy_s(num_bytes)
            for level in levels
        )

    def _ports_s(self, sketch: Sketch, edges: dict[tuple[int, int], _Crossing]) -> float:
        """Return the seconds per minibatch of the busiest port."""
        load: defaultdict[Port, float] = defaultdict(float)
        for index, (start, stop, replicas) in enumerate(sketch.stages):
            weights = sum(bucket.num_bytes for bucket in self._stage(start, stop).buckets)
            if replicas > 1 and weights:
                ring = sorted(sketch.devices[index])
                servers = self._cluster.servers(ring)
                for sender, receiver, num_bytes in ALGORITHMS[ALL_REDUCE].traffic(weights, servers):
                    for port in self._ports(ring[sender], ring[receiver]):
                        load[port] += num_bytes / replicas
        for (source, target), (sent, returned, _) in edges.items():
            pairs = cycle_pairs(sketch.devices[source], sketch.devices[target])
            for one, other in pairs:
                for port in self._ports(one, other):
                    load[port] += sent / len(pairs)
                for port in self._ports(other, one):
                    load[port] += returned / len(pairs)
        levels = self._cluster.levels
        return max((each / levels[level].goodput_bytes_per_s for (level, _, _), each in load.items()), default=0.0)

    def _limits_s(self, sketch: Sketch, edges: dict[tuple[int, int], _Crossing]) -> float:
        """Return the seconds per minibatch of the busiest connection or, with host copies, of the busiest worker."""
        slowest_s = 0.0
        copying_s: Counter[int] = Counter()
        for (source, target), (sent, returned, values) in edges.items():
            pairs = cycle_pairs(sketch.devices[source], sketch.devices[target])
            cycle = math.lcm(sketch.stages[source].replicas, sketch.stages[target].replicas)
            for pair in pairs:
                level = self._level(*pair)
                slowest_s = max(slowest_s, max(sent, returned) / cycle / level.message_rate(values))
                for device in pair:
                    copying_s[device] += level.copy_s(sent + returned) / len(pairs)  # type: ignore[assignment]
        for (start, stop, replicas), devices in zip(sketch.stages, sketch.devices, strict=True):
            costs = self._stage(start, stop)
            computing_s = costs.forward_s[self._size] + costs.backward_s[self._size] + self._update_s(costs, replicas)
            slowest_s = max(slowest_s, computing_s / replicas + max(copying_s[device] for device in devices))
        return slowest_s


def _least_in_two_levels_s(levels: Sequence[Level], replicas: int, num_bytes: int) -> float:
    """Return a lower bound on the seconds of an all-reduce in two levels (`simulate/sums.py`) over all placements.

    For every level that may join the replicas: at least as many servers take part as are needed to hold them, and the
    largest server has at least an equal share of the replicas.
    """
    latency_s, rate = min(level.latency_s for level in levels), max(level.sum_bytes_per_s for level in levels)
    found, size = [], 1
    for level in levels:
        if size * level.count >= replicas:
            num_servers, inside = max(2, -(-replicas // size)), -(-replicas // level.count)
            connections = min(size, replicas)
            among = min(level.goodput_bytes_per_s, connections * level.sum_cap_bytes_per_s(connections))
            shares = (num_servers - 1) / num_servers / among + (inside - 1) / inside / rate
            found.append(2 * (num_servers + inside - 2) * latency_s + 2 * shares * num_bytes)
        size *= level.count
    return min(found)
