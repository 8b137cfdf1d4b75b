"""Resources that several use at once, each at its fair share: a fluid model.

A flow is work that goes on at some rate. It crosses resources, and takes of each its `weight` times its rate. Rates
are max-min fair: all rise together until one reaches its own cap, or a resource its capacity; those stay, the others
rise on (progressive filling; Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). They are worked out again
when flows start or end, and only for those that they meet on a resource, that these meet elsewhere, and so on.

What a flow is, is up to who makes it. On a link's port work is bytes per connection, the weight the number of
connections that go through it side by side, the capacity bytes/s: connections of one port get equal parts.
Computing is a flow as well: on a host's cores work is seconds alone, the weight the number of its threads, the cap 1.0
(its speed alone), the capacity the number of cores. Threads then get equal parts of the cores, as the kernel deals
them out, and four threads beside one on four cores run at 0.8 of their speed each. What is to happen part-way (a
bucket of gradients that is ready half-way through a backward) is the end of a flow of its own: pieces follow each other
by `then`. Rates are compared as they stand, so flows of one resource state their work in one unit.

A flow may give way: it gets what the others leave of its resource's `rest`, nothing where they leave nothing, and takes
nothing from them. So a copy to a host goes on over what messages leave of a device's lane (`copies`).

A flow that nobody meets costs no entry in the agenda, unless somebody asks to be told of its end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from pipebench.simulate.agenda import RATES, Action, Agenda

NEVER: Final = math.inf


class Resource:
    """Something that flows share.

    Attributes:
        capacity: the most that all flows together take of it, in units of work times weight per second; above 0.
        rest: what a flow that gives way has of it where no other flow takes any; there is one such flow at a time.
        lone: the last flow that met nobody when it came.
        flows: those that have met others, in the order in which they came, with their weights.
    """

    __slots__ = ("capacity", "flows", "lone", "rest")

    def __init__(self, capacity: float, rest: float = 0.0) -> None:
        self.capacity = capacity
        self.rest = rest
        self.lone: Flow = OVER
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
        yields: whether it gives way to flows that don't.
        rate: work per second now.
        start_s: when it started; infinite before.
        end_s: when the last of its work is done, if rates stay as they are; infinite before it starts. Not later than
            now, it is final.
        after: a flow that starts when this one's last work is done.
        meets: whether it has met others.
    """

    __slots__ = (
        "_freed_s", "_left", "_since_s", "_tell", "_told_s", "after", "cap", "end_s", "meets", "rate", "start_s",
        "tail_s", "uses",
    )  # fmt: skip
    yields = False

    def __init__(self, work: float, uses: Uses, tail_s: float = 0.0, cap: float = NEVER) -> None:
        self.uses = uses
        self.tail_s = tail_s
        self.cap = cap
        self.rate = 0.0
        self.start_s = self.end_s = NEVER
        self.after: Flow | None = None
        self.meets = False
        self._left = work
        self._since_s = 0.0  # when so much was left
        self._tell: Action | None = None
        self._freed_s = self._told_s = NEVER  # what the agenda has its end and its arrival at

    @property
    def arrival_s(self) -> float:
        """When it has arrived, if rates stay as they are."""
        return self.end_s + self.tail_s


class YieldingFlow(Flow):
    """Work that goes on with what other flows leave."""

    __slots__ = ()
    yields = True


OVER: Final = Flow(0.0, ())  # the flow before the first
OVER.end_s = -NEVER


class Sharing:
    """Starts flows and keeps their rates fair.

    Args:
        agenda: where ends of flows are put down.
    """

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._changed: dict[Resource, None] = {}  # on which flows have started or ended at this moment

    def start(self, flow: Flow, now_s: float) -> None:
        """Let a flow start now."""
        flow.start_s = flow._since_s = now_s
        if flow._left <= 0:
            flow.end_s = now_s
        elif flow.yields:
            self._meet(flow, now_s)
            return
        else:
            rate, uses = flow.cap, flow.uses
            for resource, weight in uses:
                if resource.flows or resource.lone.end_s > now_s:
                    self._meet(flow, now_s)
                    return
                if resource.capacity < rate * weight:
                    rate = resource.capacity / weight
            for resource, _ in uses:
                resource.lone = flow
            flow.rate = rate
            flow.end_s = now_s + flow._left / rate
        if flow.after is not None or flow._tell is not None:
            self._announce(flow)

    def then(self, flow: Flow, after: Flow, now_s: float) -> None:
        """Let a flow start when another's last work is done; nothing else comes after that one."""
        if flow.end_s <= now_s:
            self.start(after, now_s)
            return
        flow.after = after
        self._announce(flow)

    def tell(self, flow: Flow, action: Action, now_s: float) -> None:
        """Let an action happen when a flow has arrived, or now if it has."""
        if flow.end_s <= now_s:  # final
            self._agenda.push(max(now_s, flow.arrival_s), action)
        else:
            flow._tell = action
            self._announce(flow)

    def _meet(self, flow: Flow, now_s: float) -> None:
        """Start a flow where others are under way."""
        for resource, _ in flow.uses:
            other = resource.lone
            if other.end_s > now_s:
                other.meets = True
                for each, weight in other.uses:
                    each.flows[other] = weight
                    each.lone = OVER
        flow.meets = True
        for resource, weight in flow.uses:
            resource.flows[flow] = weight
        self._change(flow.uses, now_s)

    def _change(self, uses: Uses, now_s: float) -> None:
        """Let rates be worked out when all that happens at this moment has happened: often many start at once."""
        if not self._changed:
            self._agenda.push(now_s, self._share, RATES)
        for resource, _ in uses:
            self._changed[resource] = None

    def _announce(self, flow: Flow) -> None:
        """Put down what happens at a flow's end, as rates are now; what was put down before is passed over."""
        end_s = flow.end_s
        if end_s == NEVER:
            flow._freed_s = flow._told_s = NEVER
            return
        if flow._freed_s != end_s and (flow.after is not None or flow.meets):
            flow._freed_s = end_s
            self._agenda.push(end_s, partial(self._free, flow))
        if flow._tell is not None and flow._told_s != end_s + flow.tail_s:
            flow._told_s = end_s + flow.tail_s
            self._agenda.push(flow._told_s, partial(self._arrive, flow))

    def _free(self, flow: Flow, now_s: float) -> None:
        """Give back what a flow took, if this is its end."""
        if now_s != flow._freed_s:
            return
        flow._freed_s = -NEVER
        if flow.meets:
            for resource, _ in flow.uses:
                del resource.flows[flow]
            self._change(flow.uses, now_s)
        if flow.after is not None:
            self.start(flow.after, now_s)

    def _arrive(self, flow: Flow, now_s: float) -> object:
        """Tell of a flow that it has arrived, if it has."""
        tell = flow._tell
        if now_s != flow._told_s or tell is None:
            return None
        flow._told_s, flow._tell = -NEVER, None  # an action knows its flow: no cycle is left
        return tell(now_s)

    def _share(self, now_s: float) -> None:
        """Work out the rates of all flows that can be reached from where something has changed."""
        flows = _reached(self._changed, now_s)
        self._changed.clear()
        for flow, rate in _rates(flows).items():
            if rate != flow.rate:
                if flow.rate > 0:
                    flow._left = max(0.0, flow._left - flow.rate * (now_s - flow._since_s))
                flow._since_s, flow.rate = now_s, rate
                flow.end_s = now_s + flow._left / rate if rate > 0 else NEVER
            self._announce(flow)


def _rates(flows: Sequence[Flow]) -> dict[Flow, float]:
    """Return the rates of flows that meet nobody else: fair ones, and of those that give way what is left."""
    first = [flow for flow in flows if not flow.yields]
    rates = dict(zip(first, fair_rates(first), strict=True))
    if len(first) < len(flows):
        for flow in flows:
            if flow.yields:
                rates[flow] = min(flow.cap, *(_left_of(resource, rates) / weight for resource, weight in flow.uses))
    return rates


def _left_of(resource: Resource, rates: Mapping[Flow, float]) -> float:
    taken = sum(weight * rates.get(flow, 0.0) for flow, weight in resource.flows.items() if not flow.yields)
    return max(0.0, resource.rest - taken)


class _Filling:
    """A resource while rates rise: what is left of it, the weight of the flows that still rise, and all its flows."""

    __slots__ = ("flows", "left", "rising", "weight")

    def __init__(self, capacity: float) -> None:
        self.left = capacity
        self.weight = 0.0
        self.rising = 0
        self.flows: list[Flow] = []


def fair_rates(flows: Sequence[Flow]) -> list[float]:
    """Return the max-min fair rates of flows that cross their resources with each other, and with nobody else."""
    filling: dict[Resource, _Filling] = {}
    shared: dict[Flow, list[tuple[_Filling, float]]] = {}
    caps: dict[Flow, float] = {}
    for flow in flows:
        cap, own = flow.cap, []
        for resource, weight in flow.uses:
            if len(resource.flows) == 1:  # its own: a ring has thousands
                if resource.capacity < cap * weight:
                    cap = resource.capacity / weight
                continue
            found = filling.get(resource)
            if found is None:
                found = filling[resource] = _Filling(resource.capacity)
            found.weight += weight
            found.rising += 1
            found.flows.append(flow)
            own.append((found, weight))
        shared[flow], caps[flow] = own, cap
    capped = sorted((flow for flow in flows if caps[flow] < NEVER), key=caps.__getitem__, reverse=True)
    rates: dict[Flow, float] = {}
    rate, rising = 0.0, [*filling.values()]
    while len(rates) < len(flows):
        # All that still rise are at one rate, so a resource is full where what others left it is dealt out.
        full = min([each.left / each.weight for each in rising], default=NEVER)
        while capped and capped[-1] in rates:
            capped.pop()
        if capped and caps[capped[-1]] <= full:
            rate, stay = max(rate, caps[capped[-1]]), [capped[-1]]
        else:
            rate = max(rate, full)  # never falls, whatever was rounded
            stay = [flow for each in rising if each.left / each.weight <= rate for flow in each.flows]
        for flow in stay:
            if flow not in rates:
                rates[flow] = min(rate, caps[flow])
                for found, weight in shared[flow]:
                    found.left -= weight * rate
                    found.weight -= weight
                    found.rising -= 1
        rising = [each for each in rising if each.rising]
    return [rates[flow] for flow in flows]


def _reached(resources: Iterable[Resource], now_s: float) -> list[Flow]:
    """Return the flows that cross some resources, that these meet elsewhere, and so on; what is over is left out."""
    queue = [*resources]
    seen = set(queue)
    flows: dict[Flow, None] = {}
    for resource in queue:
        for flow in resource.flows:
            if flow.end_s > now_s and flow not in flows:
                flows[flow] = None
                for other, _ in flow.uses:
                    if len(other.flows) > 1 and other not in seen:
                        seen.add(other)
                        queue.append(other)
    return [*flows]
