"""Flows on shared resources: closed formulas, brute force, and invariants."""

import math
import random

import pytest

from pipebench.simulate.agenda import Agenda
from pipebench.simulate.sharing import NEVER, Flow, Resource, Sharing, fair_rates
from tests.in_turn import in_turn
from tests.oracles.sharing import Given, ends


def played(capacities: list[float], given: list[Given], tail_s: float = 0.0) -> list[Flow]:
    """Run flows to their ends."""
    agenda = Agenda()
    sharing, resources = Sharing(agenda), [Resource(capacity) for capacity in capacities]
    flows = []
    for each in given:
        uses = tuple((resources[index], weight) for index, weight in each.weights.items())
        flow = Flow(each.work, uses, tail_s, each.cap)
        flows.append(flow)
        agenda.push(each.start_s, lambda now_s, flow=flow: sharing.start(flow, now_s))  # type: ignore[misc]
    agenda.play()
    return flows


def rates_of(flows: list[Flow]) -> list[float]:
    """Return the rates of flows that are on their resources."""
    for flow in flows:
        for resource, weight in flow.uses:
            resource.flows[flow] = weight
    return fair_rates(flows)


def on_port(start_s: float, work: float, weight: float = 1.0, cap: float = NEVER) -> Given:
    return Given(start_s, work, {0: weight}, cap)


def test_two_flows_of_one_port_get_half_each() -> None:
    """12 units at 2 per second alone for 2 s, then at 1: 4 + 4 of 12; the other's 4 take 4 s; the rest alone again."""
    flows = played([2.0], [on_port(0.0, 12.0), on_port(2.0, 4.0)], tail_s=0.5)
    assert [flow.end_s for flow in flows] == [8.0, 6.0]
    assert [flow.arrival_s for flow in flows] == [8.5, 6.5]


def test_three_that_come_together_leave_together() -> None:
    assert [flow.end_s for flow in played([3.0], [on_port(1.0, 5.0)] * 3)] == [6.0] * 3


def test_a_flow_held_elsewhere_leaves_the_rest_to_others() -> None:
    """Max-min, not equal parts: the flow over both ports is held to 1 of 4 by the narrow one."""
    given = [
        Given(0.0, 4.0, {0: 1.0}, NEVER),
        Given(0.0, 2.0, {0: 1.0, 1: 1.0}, NEVER),
        Given(0.0, 2.0, {1: 1.0}, NEVER),
    ]
    resources = [Resource(4.0), Resource(2.0)]
    flows = [Flow(each.work, tuple((resources[i], w) for i, w in each.weights.items())) for each in given]
    assert rates_of(flows) == [3.0, 1.0, 1.0]
    # 4 units at 3 per second end at 4/3, 2 at 1 per second at 2, both
    assert [flow.end_s for flow in played([4.0, 2.0], given)] == [pytest.approx(4 / 3), 2.0, 2.0]


def test_threads_get_equal_parts_of_the_cores() -> None:
    """Four threads beside one on four cores: five threads at 0.8. Work is seconds alone, the cap the speed alone."""
    four, one = on_port(0.0, 8.0, 4.0, 1.0), on_port(0.0, 8.0, 1.0, 1.0)
    assert [flow.end_s for flow in played([4.0], [four, one])] == [10.0, 10.0]
    assert [flow.end_s for flow in played([5.0], [four, one])] == [8.0, 8.0], "a core for each: nothing is shared"
    assert [flow.end_s for flow in played([2.0], [on_port(0.0, 3.0, 1.0, 1.0)] * 4)] == [6.0] * 4


def test_a_flow_does_not_share_with_an_ended_one() -> None:
    flows = played([1.0], [on_port(0.0, 2.0), on_port(2.0, 3.0), on_port(9.0, 1.0)])
    assert [flow.end_s for flow in flows] == [2.0, 5.0, 10.0]


def test_flows_of_one_connection_follow_each_other() -> None:
    agenda = Agenda()
    sharing, port = Sharing(agenda), Resource(1.0)
    first, second, third = (Flow(work, ((port, 1.0),), 0.25) for work in (2.0, 3.0, 0.0))
    notified: list[tuple[str, float]] = []
    sharing.start(first, 0.0)
    assert not agenda.heap, "nobody is met, nobody asks: no entry"
    sharing.then(first, second, 0.0)
    sharing.then(second, third, 0.0)
    sharing.notify(second, lambda now_s: notified.append(("second", now_s)), 0.0)
    sharing.notify(third, lambda now_s: notified.append(("third", now_s)), 0.0)
    sharing.notify(first, lambda now_s: notified.append(("first", now_s)), 0.0)
    agenda.play()
    assert notified == [("first", 2.25), ("second", 5.25), ("third", 5.25)]
    sharing.notify(first, lambda now_s: notified.append(("late", now_s)), 7.0)
    agenda.play()
    assert notified[-1] == ("late", 7.0)


def test_waiters_get_the_actual_end() -> None:
    """Its end is scheduled at 4; from 2 on another flow takes half of the rate, so it ends at 6."""
    agenda = Agenda()
    sharing, port = Sharing(agenda), Resource(1.0)
    notified: list[float] = []
    flow = Flow(4.0, ((port, 1.0),))
    sharing.start(flow, 0.0)
    sharing.notify(flow, notified.append, 0.0)
    agenda.push(2.0, lambda now_s: sharing.start(Flow(3.0, ((port, 1.0),)), now_s))
    agenda.play()
    assert notified == [6.0]


def drawn(seed: int) -> tuple[list[float], list[Given]]:
    draw = random.Random(seed)
    capacities = [draw.choice((1.0, 2.0, 4.0)) for _ in range(draw.randint(1, 5))]
    given = []
    for _ in range(draw.randint(2, 8)):
        crossed = draw.sample(range(len(capacities)), draw.randint(1, len(capacities)))
        weights = {index: draw.choice((0.5, 1.0, 1.0, 3.0)) for index in crossed}
        given.append(Given(draw.randint(0, 8) / 2, draw.randint(1, 12) / 2, weights, draw.choice((0.25, 1.0, NEVER))))
    return capacities, given


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_ends_are_those_of_tiny_steps(seed: int) -> None:
    capacities, given = drawn(seed)
    found = [flow.end_s for flow in played(capacities, given)]
    step_s = 0.005
    expected = ends(given, capacities, step_s, 0.001)
    # Each flow's rate is off by less than a grain per flow, and every end before it by a step.
    assert found == pytest.approx(expected, rel=0.03, abs=step_s * (len(given) + 1))


@in_turn(*zip(range(200), strict=True))
def test_rates_are_fair_and_use_all_capacity(seed: int) -> None:
    """Max-min: each flow is at its cap, or uses a full resource on which no flow is faster."""
    capacities, given = drawn(seed)
    resources = [Resource(capacity) for capacity in capacities]
    flows = [Flow(g.work, tuple((resources[i], w) for i, w in g.weights.items()), 0.0, g.cap) for g in given]
    rates = dict(zip(flows, rates_of(flows), strict=True))
    taken = {r: sum(w * rates[f] for f in flows for each, w in f.uses if each is r) for r in resources}
    assert all(taken[resource] <= resource.capacity * (1 + 1e-12) for resource in resources)
    for flow in flows:
        held = [
            resource
            for resource, _ in flow.uses
            if math.isclose(taken[resource], resource.capacity)
            and all(rates[other] <= rates[flow] * (1 + 1e-12) for other in flows if resource in dict(other.uses))
        ]
        assert rates[flow] == flow.cap or held


@in_turn(*zip(range(200), strict=True))
def test_nothing_ends_earlier_than_alone_and_no_resource_does_more_than_it_can(seed: int) -> None:
    capacities, given = drawn(seed)
    flows = played(capacities, given)
    for each, flow in zip(given, flows, strict=True):
        (alone,) = played(capacities, [each])
        assert flow.end_s >= alone.end_s * (1 - 1e-12)
    for index, capacity in enumerate(capacities):
        users = [(g, f) for g, f in zip(given, flows, strict=True) if index in g.weights]
        if users:
            span_s = max(f.end_s for _, f in users) - min(g.start_s for g, _ in users)
            assert sum(g.work * g.weights[index] for g, _ in users) <= capacity * span_s * (1 + 1e-9)


@in_turn(*zip(range(200), strict=True))
def test_a_port_never_idles_while_someone_has_bytes_for_it(seed: int) -> None:
    """One port, no caps: whoever shares it, the last byte leaves when it would if all went one after the other."""
    draw = random.Random(seed)
    given = sorted(
        (on_port(draw.random() * 10, draw.random() * 5, draw.choice((1.0, 2.0))) for _ in range(12)),
        key=lambda each: each.start_s,
    )
    busy_until_s = 0.0
    for each in given:
        busy_until_s = max(busy_until_s, each.start_s) + each.work * each.weights[0] / 2.0
    assert max(flow.end_s for flow in played([2.0], given)) == pytest.approx(busy_until_s, rel=1e-12)
