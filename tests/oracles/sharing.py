"""Max-min fair sharing by brute force: small time steps, and rates that are raised in small increments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Given:
    """A flow."""

    start_s: float  # when it starts
    work: float  # to be done
    weights: Mapping[int, float]  # what it takes of each resource per unit of rate
    cap: float  # largest rate


def rates(flows: Sequence[Given], capacities: Sequence[float], grain: float) -> list[float]:
    """Return the flows' rates: each is raised by `grain` in turn until its cap or a resource's capacity is reached."""
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
    """Return when each flow ends, to `step_s`."""
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
