"""What a plan's steady state takes at least: which plans are worth simulating.

A bottleneck (see `placement_costs` and `loops`) is made of sums over states, so that searches can weigh millions of
stages; half of an average bucket stands for the last one. A floor is made of what the simulator is given, the buckets
that a stage's gradients really come in among them:

- a replica's round is a forward, a backward, what is left of the gradient sum after it, and an update;
- with d minibatches in flight, a stage finishes d of them in the time that one takes to a later stage and back, those
  apart that wait there for their turn (as in `loops`);
- a port takes as long as its bytes do, and a connection as long as its messages one after the other;
- a worker that copies messages from and to its host does nothing else meanwhile;
- a worker loads its minibatches one after the other.

Simulated times are never below it in the study of `reports/planner_regret.md`, and equal to it in most plans.
"""

import bisect
import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from pipebench.cluster import Cluster, Level
from pipebench.model.plan import Plan, StagePlan
from pipebench.planner.flat import SearchStage
from pipebench.planner.placement_costs import LONGEST_CYCLE
from pipebench.planner.states import States
from pipebench.profile.model import Profile
from pipebench.schedule.orders import ONE_F_ONE_B
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.simulate.costs import StageCosts, stage_costs
from pipebench.simulate.sums import traffic


class Sketch(NamedTuple):
    """A plan before anything but its floor is known: stages between states, devices of their replicas, depth.

    Without devices its floor is below those of all placements.
    """

    stages: tuple[SearchStage, ...]
    devices: tuple[tuple[int, ...], ...]
    depth: int

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(stage.replicas for stage in self.stages)


_Port = tuple[int, int, bool]  # level, component of the level below, whether it sends


class _Crossing(NamedTuple):
    """What goes from a stage to another: bytes forward and back, and of how many values; of one size, for a floor."""

    sent: int
    returned: int
    values: int


_NOTHING = _Crossing(0, 0, 0)


class Floors:
    """Floors of plans for one model on one cluster, under 1F1B without flushes."""

    def __init__(
        self, states: States, profile: Profile, cluster: Cluster, size: int, memory: Sequence[str], update_cost: float,
        relay: bool = False,
    ) -> None:  # fmt: skip
        """Take what the simulator is given.

        Args:
            states: where the model can be cut, along its order of execution.
            profile: its layers that the states hold, the loss last.
            cluster: the links.
            size: samples of what travels.
            memory: policy of each of those layers.
            update_cost: what an update takes, in optimizer steps.
            relay: whether what skips stages goes through all of those between.
        """
        self._profile, self._cluster, self._size, self._memory = profile, cluster, size, tuple(memory)
        self._update_cost, self._relay = update_cost, relay
        self._limited = any(
            level.host_copy_bytes_per_s or level.message_cap_bytes_per_s < math.inf for level in cluster.levels
        )
        self._places = [members.bit_count() for members in states.members]  # layers before each state
        self.rows = profile.layers[size]
        self._stage = cache(self._stage_costs)
        self._crossing = cache(self._values_across)
        self._level = cache(self._level_between)
        self._ring = cache(self._ring_s)
        self._ports = cache(self._ports_between)
        self.warmups = cache(_warmups)

    def floor_s(self, sketch: Sketch) -> float:
        """Return the seconds per minibatch that a plan takes at least."""
        edges = self._edges(sketch)
        rounds = [self._round_s(sketch, index) for index in range(len(sketch.stages))]
        slowest_s = max(self._rounds_s(sketch, rounds), self._loops_s(sketch, rounds, edges))
        if not sketch.devices:
            return slowest_s
        limits_s = self._limits_s(sketch, edges) if self._limited else 0.0
        return max(slowest_s, self._ports_s(sketch, edges), limits_s)

    def alone_s(self, stage: SearchStage) -> float:
        """Return the seconds per minibatch that a stage takes at least, wherever it stands, in any plan."""
        sketch = Sketch((stage,), (), 1)
        return self._rounds_s(sketch, [self._round_s(sketch, 0)])

    def _stage_costs(self, start: int, stop: int) -> StageCosts:
        first, last = self._places[start], self._places[stop]
        alone = StagePlan(first, last, 1, (0,), self._memory[first:last])
        return stage_costs(self._profile, Plan("", (alone,), 1), self._update_cost).stages[0]

    @cached_property
    def _readers(self) -> list[list[int]]:
        """Readers of every layer's output, ascending."""
        readers: list[list[int]] = [[] for _ in self.rows]
        for index, row in enumerate(self.rows):
            for source in row.reads:
                readers[source].append(index)
        return readers

    @cached_property
    def _last_reader(self) -> np.ndarray:
        return np.array([readers[-1] if readers else -1 for readers in self._readers])

    def _values_across(self, place: int) -> list[int]:
        """Return the layers before a place whose output is read from there on."""
        return [int(value) for value in np.flatnonzero(self._last_reader[:place] >= place)]

    def _edges(self, sketch: Sketch) -> dict[tuple[int, int], _Crossing]:
        """Return (source stage, target stage) to what crosses."""
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

    def _level_between(self, one: int, other: int) -> Level:
        return self._cluster.levels[self._cluster.level_between(one, other)]

    def _round_s(self, sketch: Sketch, index: int) -> float:
        """Return the seconds of one replica's round."""
        start, stop, replicas = sketch.stages[index]
        costs = self._stage(start, stop)
        backward_s, end_s = costs.backward_s[self._size], 0.0
        if replicas > 1:
            for bucket in costs.buckets:
                ready_s = bucket.ready * backward_s
                devices = sketch.devices[index] if sketch.devices else None
                end_s = max(end_s, ready_s) + self._ring(devices, replicas, bucket.num_bytes)
        return costs.forward_s[self._size] + max(backward_s, end_s) + costs.update_s

    def _ring_s(self, devices: tuple[int, ...] | None, replicas: int, num_bytes: int) -> float:
        """Return the seconds of a ring all-reduce that has its links to itself; of the fastest without devices."""
        part = num_bytes / replicas
        if devices is None:  # some link of the ring is of a level with room for all of them
            counts = itertools.accumulate((level.count for level in self._cluster.levels), operator.mul)
            rooms = [level for level, count in zip(self._cluster.levels, counts, strict=True) if count >= replicas]
            step_s = min(part / level.sum_bytes_per_s + level.latency_s for level in rooms)
        else:
            ring = sorted(devices)
            levels = {self._level(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)}
            step_s = max(part / level.sum_bytes_per_s + level.latency_s for level in levels)
        return 2 * (replicas - 1) * step_s

    def _rounds_s(self, sketch: Sketch, rounds: Sequence[float]) -> float:
        loads = (self._stage(start, stop).load_s[self._size] for start, stop, _ in sketch.stages)
        return max(max(round_s, load_s) / m for round_s, load_s, m in zip(rounds, loads, sketch.replicas, strict=True))

    def _loops_s(self, sketch: Sketch, rounds: Sequence[float], edges: dict[tuple[int, int], _Crossing]) -> float:
        replicas, slowest_s = sketch.replicas, 0.0
        warmups = self.warmups(replicas, sketch.depth)
        ways = [self._way_s(sketch, index, edges.get((index, index + 1))) for index in range(len(replicas) - 1)]
        for first, m in enumerate(replicas):
            loop_s = rounds[first]
            sums = m > 1 and bool(self._stage(*sketch.stages[first][:2]).buckets)
            for last in range(first + 1, len(replicas)):
                way_s = ways[last - 1]
                if way_s is None:
                    break
                costs = self._stage(*sketch.stages[last][:2])
                loop_s += way_s + costs.forward_s[self._size] + costs.backward_s[self._size]
                waiting = (warmups[last] - 1) * replicas[last]
                if sums:  # a round goes on when its last minibatch is back
                    waiting = -(-waiting // m) * m
                slowest_s = max(slowest_s, loop_s / (warmups[first] * m - waiting))
        return slowest_s

    def _way_s(self, sketch: Sketch, index: int, crossing: _Crossing | None) -> float | None:
        """Return the seconds from a stage to the next and back where they are nearest; None if nothing comes back."""
        if crossing is None or crossing.returned == 0:
            return None
        anywhere = self._cluster.levels
        levels = {self._level(*pair) for pair in _pairs(sketch, index, index + 1)} if sketch.devices else {*anywhere}
        num_bytes = crossing.sent + crossing.returned
        return min(
            num_bytes / level.message_rate(crossing.values) + 2 * level.latency_s + 2 * level.copy_s(num_bytes)
            for level in levels
        )

    def _ports_s(self, sketch: Sketch, edges: dict[tuple[int, int], _Crossing]) -> float:
        """Return the seconds per minibatch of the busiest port, for its bytes alone."""
        load: defaultdict[_Port, float] = defaultdict(float)
        for index, (start, stop, replicas) in enumerate(sketch.stages):
            weights = sum(bucket.num_bytes for bucket in self._stage(start, stop).buckets)
            if replicas > 1 and weights:
                ring = sorted(sketch.devices[index])
                for sender, receiver, num_bytes in traffic(ALL_REDUCE, weights, replicas):
                    for port in self._ports(ring[sender], ring[receiver]):
                        load[port] += num_bytes / replicas
        for (source, target), (sent, returned, _) in edges.items():
            pairs = _pairs(sketch, source, target)
            for one, other in pairs:
                for port in self._ports(one, other):
                    load[port] += sent / len(pairs)
                for port in self._ports(other, one):
                    load[port] += returned / len(pairs)
        levels = self._cluster.levels
        return max((each / levels[level].goodput_bytes_per_s for (level, _, _), each in load.items()), default=0.0)

    def _limits_s(self, sketch: Sketch, edges: dict[tuple[int, int], _Crossing]) -> float:
        """Return the seconds per minibatch of the busiest connection, and of the worker busiest with copies, too."""
        slowest_s = 0.0
        copying_s: Counter[int] = Counter()
        for (source, target), (sent, returned, values) in edges.items():
            pairs = _pairs(sketch, source, target)
            cycle = math.lcm(sketch.stages[source].replicas, sketch.stages[target].replicas)
            for pair in pairs:
                level = self._level(*pair)
                slowest_s = max(slowest_s, max(sent, returned) / cycle / level.message_rate(values))
                for device in pair:
                    copying_s[device] += level.copy_s(sent + returned) / len(pairs)  # type: ignore[assignment]
        for (start, stop, replicas), devices in zip(sketch.stages, sketch.devices, strict=True):
            costs = self._stage(start, stop)
            computing_s = costs.forward_s[self._size] + costs.backward_s[self._size] + costs.update_s
            slowest_s = max(slowest_s, computing_s / replicas + max(copying_s[device] for device in devices))
        return slowest_s

    def _ports_between(self, sender: int, receiver: int) -> tuple[_Port, _Port]:
        level = self._cluster.level_between(sender, receiver)
        return (
            (level, self._cluster.component(sender, level), True),
            (level, self._cluster.component(receiver, level), False),
        )


def _pairs(sketch: Sketch, source: int, target: int) -> list[tuple[int, int]]:
    """Return the devices between which the minibatches of a cycle go."""
    own, others = sketch.devices[source], sketch.devices[target]
    cycle = min(math.lcm(len(own), len(others)), LONGEST_CYCLE)
    return [(own[k % len(own)], others[k % len(others)]) for k in range(cycle)]


def _warmups(replicas: tuple[int, ...], depth: int) -> tuple[int, ...]:
    return Pipeline(replicas, chain(len(replicas)), ONE_F_ONE_B, False, depth).warmups
