"""Resources that several use at once, each at its fair share: a fluid model.

A flow is work that goes on at some rate. It crosses resources, and takes of each its `weight` times its rate. Rates
are max-min fair: all rise together until one reaches its own cap, or a resource its capacity; those stay, the others
rise on (progressive filling; Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). They are worked out again
when a flow starts or ends, and only for the flows that it meets on a resource, those that these meet, and so on.

What a flow is, is up to who makes it. On a link's port work is bytes per connection, the weight the number of
connections that go through it side by side, the capacity bytes/s: connections of one port get equal parts.
Computing is a flow as well: on a host's cores work is seconds alone, the weight the number of its threads, the cap 1.0
(its speed alone), the capacity the number of cores. Threads then get equal parts of the cores, as the kernel deals
them out, and four threads beside one on four cores run at 0.8 of their speed each. What is to happen part-way (a
bucket of gradients that is ready half-way through a backward) is the end of a flow of its own: pieces follow each other
by `then`. Rates are compared as they stand, so flows of one resource state their work in one unit.

A flow that nobody meets costs no entry in the agenda, unless somebody asks to be told of its end.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Final

from pipebench.simulate.agenda import Action, Agenda

NEVER: Final = math.inf


class Resource:
    """Something that flows share.

    Attributes:
        capacity: the most that all flows together take of it, in units of work times weight per second; above 0.
        flows: those that cross it, in the order in which they came, with their weights; some may be over.
    """

    __slots__ = ("capacity", "flows")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.flows: dict[Flow, float] = {}


Uses = tuple[tuple[Resource, float], ...]  # what a flow crosses, each once, with its weight


class Flow:
    """Work that goes on at a rate.

    Args:
        work: how much there is to do.
        uses: the resources that it crosses, with its weights.
        tail_s: seconds from its last work until it has arrived (a link's latency); it takes nothing meanwhile.
        cap: the most that its rate may be.

    Attributes:
        rate: work per second now.
        start_s: when it started; infinite before.
        end_s: when the last of its work is done, if rates stay as they are; infinite before it starts. Not later than
            now, it is final.
        after: a flow that starts when this one's last work is done.
    """

    __slots__ = ("_freed_s", "_left", "_since_s", "_tell", "_told_s", "after", "cap", "end_s", "rate", "start_s",
                 "tail_s", "uses")  # fmt: skip

    def __init__(self, work: float, uses: Uses, tail_s: float = 0.0, cap: float = NEVER) -> None:
        self.uses = uses
        self.tail_s = tail_s
        self.cap = cap
        self.rate = 0.0
        self.start_s = self.end_s = NEVER
        self.after: Flow | None = None
        self._left = work
        self._since_s = 0.0  # when so much was left
        self._tell: Action | None = None
        self._freed_s = self._told_s = NEVER  # what the agenda has its end and its arrival at

    @property
    def arrival_s(self) -> float:
        """When it has arrived, if rates stay as they are."""
        return self.end_s + self.tail_s


class Sharing:
    """Starts flows and keeps their rates fair.

    Args:
        agenda: where ends of flows are put down.
    """

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda

    def start(self, flow: Flow, now_s: float) -> None:
        """Let a flow start now."""
        flow.start_s = flow._since_s = now_s
        if flow._left <= 0:
            flow.end_s = now_s
            self._announce(flow, meets=False)
            return
        rate, meets = flow.cap, False
        for resource, weight in flow.uses:
            others = resource.flows
            if others:
                _sweep(resource, now_s)
                meets = meets or bool(others)
            others[flow] = weight
            rate = min(rate, resource.capacity / weight)
        if meets:
            self._share(flow.uses, now_s)
        else:
            flow.rate = rate
            flow.end_s = now_s + flow._left / rate
            self._announce(flow, meets=False)

    def then(self, flow: Flow, after: Flow, now_s: float) -> None:
        """Let a flow start when another's last work is done; nothing else comes after that one."""
        if flow.end_s <= now_s:
            self.start(after, now_s)
            return
        flow.after = after
        if flow.end_s < NEVER:
            self._announce(flow, meets=False)

    def tell(self, flow: Flow, action: Action, now_s: float) -> None:
        """Let an action happen when a flow has arrived, or now if it has."""
        flow._tell = action
        if flow.end_s <= now_s:  # final
            self._agenda.push(max(now_s, flow.arrival_s), action)
        elif flow.end_s < NEVER:
            self._announce(flow, meets=False)

    def _announce(self, flow: Flow, *, meets: bool) -> None:
        """Put down what happens at a flow's end, as rates are now; what was put down before is passed over."""
        end_s = flow.end_s
        if (meets or flow.after is not None) and flow._freed_s != end_s:
            flow._freed_s = end_s
            self._agenda.push(end_s, partial(self._free, flow))
        if flow._tell is not None and flow._told_s != flow.arrival_s:
            flow._told_s = flow.arrival_s
            self._agenda.push(flow.arrival_s, partial(self._arrive, flow))

    def _free(self, flow: Flow, now_s: float) -> None:
        """Give back what a flow took, if this is its end."""
        if now_s != flow._freed_s:
            return
        flow._freed_s = -NEVER
        _detach(flow)
        self._share(flow.uses, now_s)
        if flow.after is not None:
            self.start(flow.after, now_s)

    def _arrive(self, flow: Flow, now_s: float) -> None:
        if now_s == flow._told_s:
            assert flow._tell is not None
            flow._told_s = -NEVER
            flow._tell(now_s)

    def _share(self, uses: Uses, now_s: float) -> None:
        """Work out the rates of all flows that can be reached from some resources."""
        flows = _reached(uses, now_s)
        for flow, rate in zip(flows, fair_rates(flows), strict=True):
            if rate != flow.rate:
                if flow.rate > 0:
                    flow._left = max(0.0, flow._left - flow.rate * (now_s - flow._since_s))
                flow._since_s, flow.rate = now_s, rate
                flow.end_s = now_s + flow._left / rate
            self._announce(flow, meets=len(flows) > 1)


def fair_rates(flows: Iterable[Flow]) -> list[float]:
    """Return the max-min fair rates of flows that meet no others."""
    rates: dict[Flow, float] = {}
    rising = dict.fromkeys(flows)
    everyone = [*rising]
    left: dict[Resource, float] = {}
    weights: dict[Resource, float] = {}
    for flow in everyone:
        for resource, weight in flow.uses:
            left.setdefault(resource, resource.capacity)
            weights[resource] = weights.get(resource, 0.0) + weight
    rate = 0.0
    while rising:
        # All that still rise are at one rate, so a resource is full where what others left it is dealt out.
        full = min((left[resource] / weight for resource, weight in weights.items()), default=NEVER)
        capped = min(flow.cap for flow in rising)
        rate = max(rate, min(full, capped))  # never falls, whatever was rounded
        if capped <= rate:
            stay = [flow for flow in rising if flow.cap <= rate]
        else:
            tight = {resource for resource, weight in weights.items() if left[resource] / weight <= rate}
            stay = [flow for flow in rising if any(resource in tight for resource, _ in flow.uses)]
        for flow in stay:
            rates[flow] = rate
            del rising[flow]
            for resource, weight in flow.uses:
                left[resource] -= weight * rate
                weights[resource] -= weight
        risen = {resource for flow in rising for resource, _ in flow.uses}
        weights = {resource: weight for resource, weight in weights.items() if resource in risen}
    return [rates[flow] for flow in everyone]


def _reached(uses: Uses, now_s: float) -> list[Flow]:
    """Return the flows that cross some resources, that these meet elsewhere, and so on; what is over is left out."""
    seen: dict[Resource, None] = dict.fromkeys(resource for resource, _ in uses)
    flows: dict[Flow, None] = {}
    queue = [*seen]
    for resource in queue:
        _sweep(resource, now_s)
        for flow in resource.flows:
            if flow not in flows:
                flows[flow] = None
                for other, _ in flow.uses:
                    if other not in seen:
                        seen[other] = None
                        queue.append(other)
    return [*flows]


def _sweep(resource: Resource, now_s: float) -> None:
    """Take off a resource's list what is over."""
    over = [flow for flow in resource.flows if flow.end_s <= now_s]
    for flow in over:
        _detach(flow)


def _detach(flow: Flow) -> None:
    for resource, _ in flow.uses:
        resource.flows.pop(flow, None)
