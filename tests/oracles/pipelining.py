"""PipeDream's steady state and memory on links that take no time; shares no code with planner and simulator.

A layer is (forward seconds, backward seconds, bytes of parameters, bytes saved); a stage is (first layer, layer after
its last, replicas). `spare` are the minibatches in flight, per replica of the first stage, beyond NOAM.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.oracles.staleness import depths

Layer = tuple[float, float, int, int]
Stage = tuple[int, int, int]


class Way(NamedTuple):
    """How a plan saves memory."""

    shards: bool  # whether the replicas of a stage shard optimizer state
    recomputes: bool  # whether layers are recomputed in the backward


WAYS = tuple(Way(shards, again) for again in (False, True) for shards in (False, True))


def every_plan(num_layers: int, workers: int) -> Iterator[list[Stage]]:
    """Yield all cuts with all numbers of replicas on at most `workers`."""
    for inner in range(num_layers):
        for cuts in itertools.combinations(range(1, num_layers), inner):
            bounds = [0, *cuts, num_layers]
            for replicas in itertools.product(range(1, workers + 1), repeat=inner + 1):
                if sum(replicas) <= workers:
                    yield [*zip(bounds, bounds[1:], replicas, strict=False)]


def num_bytes(layers: Sequence[Layer], plan: Sequence[Stage], way: Way, spare: int, *, state: int, sent: int) -> float:
    """Return the bytes of the fullest worker.

    `state` are bytes of optimizer state per byte of parameters, `sent` the bytes that cross every cut.
    """
    fullest = 0.0
    for index, (start, stop, replicas) in enumerate(plan):
        behind = sum(stage[2] for stage in plan[index + 1 :])
        in_flight = 1 + math.ceil((behind + spare * plan[0][2] * (behind > 0)) / replicas)
        weights, saved = (sum(layer[part] for layer in layers[start:stop]) for part in (2, 3))
        kept = in_flight * sent * (start > 0) + saved if way.recomputes else in_flight * saved
        cuts = (start > 0) + (stop < len(layers))
        optimizer = state * weights / (replicas if way.shards else 1)
        fullest = max(fullest, (in_flight + 1) * weights + optimizer + kept + 2 * sent * cuts)
    return fullest


def minibatch_s(
    layers: Sequence[Layer], plan: Sequence[Stage], way: Way, spare: int, update_s_per_byte: float
) -> float:
    """Return the seconds per minibatch of 1F1B-RR in the second half of a long run."""
    half = math.lcm(*(stage[2] for stage in plan)) * 8
    lists = [(stage, _passes(plan, stage, replica, spare, 2 * half)) for stage, replica in _replicas(plan)]
    ends: dict[tuple[int, str, int], float] = {}
    place, free_s = [0] * len(lists), [0.0] * len(lists)
    while any(place[worker] < len(passes) for worker, (_, passes) in enumerate(lists)):
        for worker, (stage, passes) in enumerate(lists):
            for op, minibatch in passes[place[worker] :]:
                needed = _needed(plan, stage, op, minibatch, 2 * half)
                if not needed <= ends.keys():
                    break
                began_s = max([free_s[worker], *(ends[each] for each in needed)])
                free_s[worker] = began_s + _seconds(layers, plan[stage], way, update_s_per_byte)[op]
                ends[stage, op, minibatch] = free_s[worker]
                place[worker] += 1
    last_s = [max(ends[0, "U", k] for k in range(until - plan[0][2], until)) for until in (half, half * 3 // 2)]
    return (last_s[1] - last_s[0]) / (half // 2)


def _replicas(plan: Sequence[Stage]) -> Iterator[tuple[int, int]]:
    for stage, (_, _, replicas) in enumerate(plan):
        yield from ((stage, replica) for replica in range(replicas))


def _depths(plan: Sequence[Stage], spare: int) -> list[int]:
    """Return the number of forwards before the first backward of every stage; one stage has no spare minibatches."""
    replicas = [stage[2] for stage in plan]
    return depths(replicas, math.ceil(sum(replicas) / replicas[0]) + spare * (len(plan) > 1))


def _passes(plan: Sequence[Stage], stage: int, replica: int, spare: int, count: int) -> list[tuple[str, int]]:
    """Return a replica's instructions: forwards, then a backward, an update and a forward in turn."""
    own, depth = range(replica, count, plan[stage][2]), _depths(plan, spare)[stage]
    found = [("F", minibatch) for minibatch in own[:depth]]
    for index, minibatch in enumerate(own):
        found += [("B", minibatch), ("U", minibatch)]
        found += [("F", following) for following in own[index + depth : index + depth + 1]]
    return found


def _needed(plan: Sequence[Stage], stage: int, op: str, minibatch: int, count: int) -> set[tuple[int, str, int]]:
    """Return the passes that have to end before one begins; an update waits for the backwards of its whole round."""
    if op == "U":
        replicas = plan[stage][2]
        first = minibatch // replicas * replicas
        return {(stage, "B", other) for other in range(first, min(first + replicas, count))}
    neighbour = stage - 1 if op == "F" else stage + 1
    return {(neighbour, op, minibatch)} if 0 <= neighbour < len(plan) else set()


def _seconds(layers: Sequence[Layer], stage: Stage, way: Way, update_s_per_byte: float) -> dict[str, float]:
    start, stop, replicas = stage
    forward, backward, weights = (sum(layer[part] for layer in layers[start:stop]) for part in range(3))
    update_s = update_s_per_byte * weights / (replicas if way.shards else 1)
    return {"F": forward, "B": backward + forward * way.recomputes, "U": update_s}
