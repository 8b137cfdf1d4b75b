"""Plays 1F1B without a flush from its rule alone, without time: who waits for whom, and what is kept meanwhile.

Shares no code with the schedule: a replica of stage s runs d_s forwards, then a backward and a forward in turn; the
replicas of a stage wait for each other after the last backward of every round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Step = tuple[str, int]  # F or B of a minibatch, or U of a round


@dataclass(frozen=True)
class Played:
    """What playing came to."""

    ended: bool  # whether every worker came to the end of its list; else they wait for each other
    in_flight: list[int]  # per stage, the most minibatches that a replica had run forward and not yet backward
    versions: list[int]  # per stage, the most versions that minibatches in flight and the next one used at once


def steps_of(stage: int, replica: int, replicas: Sequence[int], depth: int, num_minibatches: int) -> list[Step]:
    r = replicas[stage]
    own = list(range(replica, num_minibatches, r))
    steps = [("F", k) for k in own[:depth]]
    for index, k in enumerate(own):
        steps += [("B", k), ("U", k // r)]
        steps += [("F", own[index + depth])] if index + depth < len(own) else []
    return steps


def play(replicas: Sequence[int], depths: Sequence[int], num_minibatches: int) -> Played:
    """Return what happens when every worker goes through its list as far as it can, again and again."""
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
