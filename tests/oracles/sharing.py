"""Max-min fair sharing by brute force: time in tiny steps, and in each of them rates raised grain by grain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Given:
    """A flow: when it starts, how much it has to do, what it takes of which resource per unit of rate, and its cap."""

    start_s: float
    work: float
    weights: Mapping[int, float]
    cap: float


def rates(flows: Sequence[Given], capacities: Sequence[float], grain: float) -> list[float]:
    """Return the flows' rates: everybody in turn gets a grain more, as long as cap and capacities have room for it."""
    found = [0.0] * len(flows)
    free = [*capacities]
    rising = [*range(len(flows))]
    while rising:
        for index in [*rising]:
            flow = flows[index]
            room = all(free[resource] >= weight * grain for resource, weight in flow.weights.items())
            if not room or found[index] + grain > flow.cap:
                rising.remove(index)
                continue
            found[index] += grain
            for resource, weight in flow.weights.items():
                free[resource] -= weight * grain
    return found


def ends(flows: Sequence[Given], capacities: Sequence[float], step_s: float, grain: float) -> list[float]:
    left = [flow.work for flow in flows]
    found = [0.0] * len(flows)
    known: dict[tuple[int, ...], list[float]] = {}
    tick = 0
    while any(each > 0 for each in left):
        now_s = tick * step_s
        running = tuple(i for i, flow in enumerate(flows) if flow.start_s <= now_s and left[i] > 0)
        if running not in known:
            known[running] = rates([flows[i] for i in running], capacities, grain)
        for index, rate in zip(running, known[running], strict=True):
            left[index] -= rate * step_s
            if left[index] <= 0:
                found[index] = now_s + step_s
        tick += 1
    return found
