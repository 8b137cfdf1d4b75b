"""Executes 1F1B without a flush by its rule, without time; shares no code with the schedule.

A replica of stage s runs d_s forwards, then backwards and forwards in turn; the replicas of a stage wait for each other
after the last backward of every round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Step = tuple[str, int]  # F or B and a minibatch, or U and a round


@dataclass(frozen=True)
class Played:
    """The result of an execution."""

    ended: bool  # whether every worker executed all of its steps; else there was a deadlock
    in_flight: list[int]  # per stage, the most minibatches of a replica between their forward and backward
    versions: list[int]  # per stage, the most versions that minibatches in flight and the next one used at once


def steps_of(stage: int, replica: int, replicas: Sequence[int], depth: int, num_minibatches: int) -> list[Step]:
    """Return the steps of one replica."""
    r = replicas[stage]
    own = list(range(replica, num_minibatches, r))
    steps = [("F", k) for k in own[:depth]]
    for index, k in enumerate(own):
        steps += [("B", k), ("U", k // r)]
        steps += [("F", own[index + depth])] if index + depth < len(own) else []
    return steps


def play(replicas: Sequence[int], depths: Sequence[int], num_minibatches: int) -> Played:
    """Execute the steps of all workers, each as soon as what it depends on is done, until none can continue."""
    last = len(replicas) - 1
    workers = [(s, i) for s, r in enumerate(replicas) for i in range(r)]
    lists = [steps_of(s, i, replicas, depths[s], num_minibatches) for s, i in workers]
    position = [0] * len(workers)
    ran: dict[str, list[set[int]]] = {"F": [set() for _ in replicas], "B": [set() for _ in replicas]}
    used: list[dict[int, int]] = [{} for _ in workers]  # minibatches in flight and the version of their forward
    made = [0] * len(workers)
    in_flight, versions = [0] * len(replicas), [1] * len(replicas)

    def may(stage: int, what: str, number: int) -> bool:
        if what == "U":
            members = range(number * replicas[stage], min((number + 1) * replicas[stage], num_minibatches))
            return ran["B"][stage].issuperset(members)
        if what == "F":
            return stage == 0 or number in ran["F"][stage - 1]
        return number in (ran["F"][stage] if stage == last else ran["B"][stage + 1])

    moved = True
    while moved:
        moved = False
        for worker, (stage, _) in enumerate(workers):
            steps = lists[worker]
            while position[worker] < len(steps) and may(stage, *steps[position[worker]]):
                what, number = steps[position[worker]]
                position[worker] += 1
                moved = True
                if what == "U":
                    made[worker] += 1
                elif what == "F":
                    used[worker][number] = made[worker]
                else:
                    del used[worker][number]
                if what != "U":
                    ran[what][stage].add(number)
                in_flight[stage] = max(in_flight[stage], len(used[worker]))
                versions[stage] = max(versions[stage], len({*used[worker].values(), made[worker]}))
    return Played(all(at == len(steps) for at, steps in zip(position, lists, strict=True)), in_flight, versions)
