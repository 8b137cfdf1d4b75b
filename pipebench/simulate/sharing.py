"""Resources shared by concurrent flows at max-min fair rates: a fluid model.

A flow is work that is done at some rate. It takes its weight times its rate of every resource that it uses. All rates
rise together until one reaches its own cap, or a resource its capacity. The rates of that flow, or of that resource's
flows, are then final, and the others rise on (progressive filling; Bertsekas and Gallager, Data Networks, 1992, section
6.5.2). Rates are recomputed when flows start or end, and only for flows connected with these through shared resources.

On a link's port, work is bytes per connection, the weight is the number of parallel connections, and the capacity is in
bytes/s: connections of one port get equal parts. On a host's cores, work is the seconds that it takes alone, the weight
is the number of threads, the cap is 1.0 (full speed), and the capacity is the number of cores: threads get equal parts,
so four threads beside one on four cores run at 0.8 of their speed each. All flows of a resource have one unit of work.

A yielding flow gets what the others leave of its resource's `rest`, possibly nothing, and takes nothing from them. A
copy to a host uses what messages leave of a device's lane (`copies`).

A flow that shares no resource needs no entry in the agenda, unless an action waits for its end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from pipebench.simulate.agenda import RATES, Action, Agenda

NEVER: Final = math.inf


class Resource:
    """Something that flows share."""

    __slots__ = ("capacity", "flows", "lone", "rest")

    def __init__(self, capacity: float, rest: float = 0.0) -> None:
        self.capacity = capacity  # limit on the sum of weight times rate over all flows; above 0
        self.rest = rest  # rate of a yielding flow, of which there is at most one, if there is no other flow
        self.lone: Flow = OVER  # the last flow that did not share it
        self.flows: dict[Flow, float] = {}  # flows that share it, with their weights, in order of arrival


Uses = tuple[tuple[Resource, float], ...]  # resources that a flow uses, each once, with its weight


class Flow:
    """An amount of work that is done at a rate of at most `cap` on the resources in `uses`.

    It arrives `tail_s` seconds after its end (a link's latency), in which it uses no resource.
    """

    __slots__ = (
        "_arrives_s", "_freed_s", "_left", "_on_arrival", "_since_s", "after", "cap", "end_s", "meets", "rate",
        "start_s", "tail_s", "uses",
    )  # fmt: skip
    yields = False  # whether it gives way to other flows

    def __init__(self, work: float, uses: Uses, tail_s: float = 0.0, cap: float = NEVER) -> None:
        self.uses = uses
        self.tail_s = tail_s
        self.cap = cap
        self.rate = 0.0  # work per second now
        # The end of its work at current rates; infinite before it starts, final once it has passed.
        self.start_s = self.end_s = NEVER
        self.after: Flow | None = None  # a flow that starts at this one's end
        self.meets = False  # whether it shares resources
        self._left = work
        self._since_s = 0.0  # time of `_left`
        self._on_arrival: Action | None = None
        self._freed_s = NEVER  # scheduled end
        self._arrives_s = NEVER  # scheduled arrival

    @property
    def arrival_s(self) -> float:
        """Arrival at current rates."""
        return self.end_s + self.tail_s


class YieldingFlow(Flow):
    """A flow that gets what other flows leave."""

    __slots__ = ()
    yields = True


OVER: Final = Flow(0.0, ())  # a flow that has ended, in place of the one before the first
OVER.end_s = -NEVER


class Sharing:
    """Starts flows and keeps their rates fair."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._changed: dict[Resource, None] = {}  # with flows that started or ended at this time

    def start(self, flow: Flow, now_s: float) -> None:
        """Start a flow."""
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
        if flow.after is not None or flow._on_arrival is not None:
            self._announce(flow)

    def then(self, flow: Flow, after: Flow, now_s: float) -> None:
        """Start a flow at another's end; at most one may follow each flow."""
        if flow.end_s <= now_s:
            self.start(after, now_s)
            return
        flow.after = after
        self._announce(flow)

    def notify(self, flow: Flow, action: Action, now_s: float) -> None:
        """Run an action when a flow arrives, or now if it has."""
        if flow.end_s <= now_s:  # final
            self._agenda.push(max(now_s, flow.arrival_s), action)
        else:
            flow._on_arrival = action
            self._announce(flow)

    def _meet(self, flow: Flow, now_s: float) -> None:
        """Start a flow that shares a resource with others, and mark these as sharing."""
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
        """Schedule new rates after all other entries of this time, because many flows may start at once."""
        if not self._changed:
            self._agenda.push(now_s, self._share, RATES)
        for resource, _ in uses:
            self._changed[resource] = None

    def _announce(self, flow: Flow) -> None:
        """Schedule a flow's end and arrival at current rates; entries for other times are then ignored."""
        end_s = flow.end_s
        if end_s == NEVER:
            flow._freed_s = flow._arrives_s = NEVER
            return
        if flow._freed_s != end_s and (flow.after is not None or flow.meets):
            flow._freed_s = end_s
            self._agenda.push(end_s, partial(self._free, flow))
        if flow._on_arrival is not None and flow._arrives_s != end_s + flow.tail_s:
            flow._arrives_s = end_s + flow.tail_s
            self._agenda.push(flow._arrives_s, partial(self._arrive, flow))

    def _free(self, flow: Flow, now_s: float) -> None:
        """Release a flow's resources, if this is its end."""
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
        """Run a flow's action, if it has arrived."""
        action = flow._on_arrival
        if now_s != flow._arrives_s or action is None:
            return None
        flow._arrives_s, flow._on_arrival = -NEVER, None  # breaks the reference cycle between flow and action
        return action(now_s)

    def _share(self, now_s: float) -> None:
        """Recompute the rates of all flows connected with a change."""
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
    """Return the rates of flows that share resources with each other only, yielding ones included."""
    first = [flow for flow in flows if not flow.yields]
    rates = dict(zip(first, fair_rates(first), strict=True))
    if len(first) < len(flows):
        for flow in flows:
            if flow.yields:
                rates[flow] = min(flow.cap, *(_left_of(resource, rates) / weight for resource, weight in flow.uses))
    return rates


def _left_of(resource: Resource, rates: Mapping[Flow, float]) -> float:
    """Return the rate that a resource has left for a yielding flow."""
    taken = sum(weight * rates.get(flow, 0.0) for flow, weight in resource.flows.items() if not flow.yields)
    return max(0.0, resource.rest - taken)


class _Filling:
    """A resource while rates rise."""

    __slots__ = ("flows", "left", "rising", "weight")

    def __init__(self, capacity: float) -> None:
        self.left = capacity  # for flows whose rates still rise
        self.weight = 0.0  # of those flows
        self.rising = 0  # number of those flows
        self.flows: list[Flow] = []  # all


def fair_rates(flows: Sequence[Flow]) -> list[float]:
    """Return the max-min fair rates of flows that share resources with each other only."""
    filling: dict[Resource, _Filling] = {}
    shared: dict[Flow, list[tuple[_Filling, float]]] = {}
    caps: dict[Flow, float] = {}
    for flow in flows:
        cap, own = flow.cap, []
        for resource, weight in flow.uses:
            if len(resource.flows) == 1:  # not shared; a ring has thousands of such
                if resource.capacity < cap * weight:
                    cap = resource.capacity / weight
                continue
            found = filling.get(resource) or filling.setdefault(resource, _Filling(resource.capacity))
            found.weight += weight
            found.rising += 1
            found.flows.append(flow)
            own.append((found, weight))
        shared[flow], caps[flow] = own, cap
    capped = sorted((flow for flow in flows if caps[flow] < NEVER), key=caps.__getitem__, reverse=True)
    rates: dict[Flow, float] = {}
    rate, rising = 0.0, [*filling.values()]
    while len(rates) < len(flows):
        # Rising flows have one rate, so a resource is full at (capacity left) / (rising weight).
        full = min([each.left / each.weight for each in rising], default=NEVER)
        while capped and capped[-1] in rates:
            capped.pop()
        if capped and caps[capped[-1]] <= full:
            rate, stay = max(rate, caps[capped[-1]]), [capped[-1]]
        else:
            rate = max(rate, full)  # never falls by rounding
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
    """Return the flows connected with some resources, without those that have ended."""
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
