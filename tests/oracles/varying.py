"""Durations of segments whose minibatches differ in length, on links that take no time; no code of the simulator."""

from collections.abc import Sequence

from tests.oracles.playing import steps_of


def straight_s(forward_s: Sequence[Sequence[float]], backward_s: Sequence[Sequence[float]]) -> float:
    """Return the seconds of a straight 1F1B pipeline without a flush; times are [minibatch][stage]."""
    num_stages, last = len(forward_s[0]), len(forward_s[0]) - 1
    lists = [steps_of(s, 0, [1] * num_stages, num_stages - s, len(forward_s)) for s in range(num_stages)]
    ended_s: dict[tuple[str, int, int], float] = {}
    free_s, position = [0.0] * num_stages, [0] * num_stages
    while any(at < len(steps) for at, steps in zip(position, lists, strict=True)):
        for stage, steps in enumerate(lists):
            while position[stage] < len(steps):
                what, k = steps[position[stage]]
                needed = {"F": ("F", stage - 1, k), "B": ("B", stage + 1, k)}.get(what, ("", -1, k))
                outside = not 0 <= needed[1] <= last
                if not outside and needed not in ended_s:
                    break
                lasts_s = 0.0 if what == "U" else (forward_s if what == "F" else backward_s)[k][stage]
                free_s[stage] = max(free_s[stage], 0.0 if outside else ended_s[needed]) + lasts_s
                ended_s[what, stage, k] = free_s[stage]
                position[stage] += 1
    return max(free_s)


def data_parallel_s(minibatch_s: Sequence[float], replicas: int) -> float:
    """Return the seconds of data parallelism: every update waits for the longest of its minibatches."""
    rounds = [minibatch_s[i : i + replicas] for i in range(0, len(minibatch_s), replicas)]
    return sum(max(each) for each in rounds)
