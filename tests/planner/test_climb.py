"""The local search finds the best plan of small instances, against brute force, and respects the request."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pipebench.cluster import PER_VALUE, TWO_LEVEL, Cluster, Level
from pipebench.planner import climb, estimates
from pipebench.planner.flat import SearchStage
from pipebench.planner.floor import Floors
from pipebench.planner.neighbours import along_devices, neighbours
from pipebench.planner.placement_costs import Sketch
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.planner.predict import PlannedWorkload, predict
from pipebench.planner.states import PlanningCache
from pipebench.schedule.pipeline import noam
from reports.studies import planner_regret
from reports.studies.planner_regret import MODE, best_plan, every_plan, instance
from tests.bench.planning import chain
from tests.planner.test_shapes import planner, request

STRAIGHT = tuple(SearchStage(2 * i, 2 * i + 2, 1) for i in range(4))


def slow_links(asked: Request) -> Request:
    """Return a request on links so slow that transfers take about as long as computing."""
    level = replace(asked.cluster.levels[0], bandwidth_bytes_per_s=4e6)
    return replace(asked, cluster=replace(asked.cluster, levels=(level,)))


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *(("random", 4), ("random", 6), ("CNN-like", 6), ("CNN-like", 7), ("RNN-like", 7)),
        pytest.param("RNN-like", 5, marks=pytest.mark.slow),
    ],
)
def test_the_best_of_all_plans_is_found_where_the_first_searches_miss_it(kind: str, seed: int) -> None:
    made = Planner(instance(kind, seed).request, MODE)
    found = made.best()
    best, num_simulated = best_plan(made, found.minibatch_s)
    assert num_simulated > 0 or best is None
    assert best is None or found.minibatch_s <= 1.01 * best.minibatch_s
    assert "improved by" in found.found_by


@pytest.mark.parametrize(("kind", "seed"), [pytest.param("random", 27, marks=pytest.mark.slow), ("CNN-like", 5031)])
def test_the_best_plan_is_found_if_every_neighbour_is_worse(kind: str, seed: int) -> None:
    """Other replicas on other devices, two cuts that move at once: no plan a step away is better."""
    made = Planner(instance(kind, seed).request, MODE)
    found = made.best()
    best, _ = best_plan(made, found.minibatch_s)
    assert best is None or found.minibatch_s <= 1.01 * best.minibatch_s
    assert found.tried_all


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "seed"), [("random", 1), ("random", 2), ("CNN-like", 3), ("RNN-like", 4)])
def test_no_plan_is_faster_than_the_planner_s_bound(kind: str, seed: int) -> None:
    made = Planner(instance(kind, seed).request, MODE)
    found = made.best()
    best, _ = best_plan(made, math.inf)
    assert found.tried_all
    assert best is not None
    assert 0.978 * found.minibatch_s <= found.at_least_s <= best.minibatch_s


@pytest.mark.parametrize(
    ("kind", "seed", "flow"),
    [
        *(("random", 4, None), ("RNN-like", 4, None), ("random", 6, 0.4)),
        *(pytest.param(*it, None, marks=pytest.mark.slow) for it in (("random", 6), ("CNN-like", 2))),
    ],
)
def test_the_best_of_all_plans_is_found_where_servers_sum_first(
    kind: str, seed: int, flow: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 layers on 4 or 6 workers in servers; `flow` is a connection's share of a port."""
    monkeypatch.setattr(planner_regret, "_ports_s", lambda *_: iter((0.0,)))  # those are a ring's
    asked = instance(kind, seed, planner_regret.Sizes(range(4, 5), ((2, 2), (2, 3), (3, 2)))).request
    if flow is not None:
        asked = limited(asked, flow_bytes_per_s=flow)
    made = Planner(replace(asked, cluster=replace(asked.cluster, all_reduce=TWO_LEVEL)), MODE)
    found = made.best()
    best, _ = best_plan(made, found.minibatch_s)
    assert best is None or found.minibatch_s <= 1.01 * best.minibatch_s
    floors = Floors(made)
    for each in [*every_plan(made)][::97][:40]:
        if each.depth == noam([stage.replicas for stage in each.stages]):  # deeper ones have yet to settle
            floor_s = floors.floor_s(Sketch(each.stages, each.devices, each.depth))
            simulated = made.with_prediction(made.estimate("", each.stages, each.devices, depth=each.depth))
            assert floors.floor_s(Sketch(each.stages, (), each.depth)) <= floor_s <= simulated.minibatch_s * (1 + 1e-3)


def test_the_planner_reports_a_lower_bound_if_it_has_not_tried_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers too many to try all plans, and of few without the budget to."""
    levels = (Level("server", 4, 1e10, 1e-6), Level("cluster", 2, 1e9, 1e-5))
    large = Request(chain(120, 1), Cluster("two levels", "unit", None, levels), request([0.1]).model, 1)
    small = instance("random", 6).request
    tried = Planner(small, MODE).best()
    monkeypatch.setattr(climb, "BUDGET", 0)
    for asked, best_s in ((large, math.inf), (small, tried.minibatch_s)):
        found = Planner(asked, MODE).best()
        assert not found.tried_all
        computing_s = sum(row.forward_s + row.backward_s for row in asked.profile.layers[1])
        at_least_s = computing_s / asked.cluster.num_workers
        assert at_least_s * (1 - 1e-9) <= found.at_least_s <= min(found.minibatch_s, best_s)


@pytest.mark.parametrize(("kind", "seed"), [("random", 3), ("CNN-like", 1), ("RNN-like", 7), ("random", 6)])
def test_no_plan_is_simulated_faster_than_its_floor(kind: str, seed: int) -> None:
    made = Planner(instance(kind, seed).request, MODE)
    floors = Floors(made)
    every, equal = list(every_plan(made))[::97][:60], 0
    for each in every:
        floor_s = floors.floor_s(Sketch(each.stages, each.devices, each.depth))
        simulated = made.with_prediction(made.estimate("", each.stages, each.devices, depth=each.depth))
        assert floor_s <= simulated.minibatch_s * (1 + 1e-3)
        assert floor_s >= each.bound_s * (1 - 1e-9)
        anywhere_s = floors.floor_s(Sketch(each.stages, (), each.depth))
        assert max(map(floors.alone_s, each.stages)) <= anywhere_s <= floor_s
        equal += simulated.minibatch_s == pytest.approx(floor_s, rel=1e-6)
    assert equal >= len(every) / 4


@pytest.mark.parametrize("mode", ["pipedream", "pipedream-2bw", "gpipe"])
def test_a_plan_that_several_searches_find_is_simulated_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []

    def counted(workload: PlannedWorkload, *rest: Any) -> float:
        plan = workload.pipeline, workload.costs, workload.devices
        assert plan not in simulated
        simulated.append(plan)
        return predict(workload, *rest)

    monkeypatch.setattr(estimates, "predict", counted)
    Planner(instance("random", 6).request, mode).best()
    assert len(simulated) > 1


def test_bounds_are_made_once_for_modes_that_differ_in_their_weights_only() -> None:
    asked, cache = instance("random", 6).request, PlanningCache()
    alone, shared = (Planner(asked, "pipemare", cache=each).best() for each in (None, cache))
    (floors,) = cache.floors.values()
    num_stages = floors.alone_s.cache_info().misses
    assert Planner(asked, "spectrain", cache=cache).best().tried_all
    assert (alone, [*cache.floors.values()]) == (shared, [floors])
    assert floors.alone_s.cache_info().misses == num_stages
    assert len(Planner(replace(asked, relay=not asked.relay), "pipemare", cache=cache).best().stages) > 0
    assert len(cache.floors) == 2


def limited(asked: Request, **shares: Any) -> Request:
    """Return a request on links that limit connections, sums, messages and copies to parts of their rates."""

    def at(level: Level) -> Level:
        rates: dict[str, Any] = {
            limit: share if isinstance(share, str) else share * level.goodput_bytes_per_s
            for limit, share in shares.items()
        }
        return replace(level, **rates)

    levels = tuple(map(at, asked.cluster.levels))
    return replace(asked, cluster=replace(asked.cluster, levels=levels))


LIMITS: list[dict[str, Any]] = [
    {"flow_bytes_per_s": 0.39},
    {"ring_bytes_per_s": 0.25, "p2p_bytes_per_s": 0.6},
    {"stage_ring_bytes_per_s": 0.2},
    {"ring_bytes_per_s": 0.25, "stage_ring_bytes_per_s": 0.6},
    {"p2p_bytes_per_s": 0.2},
    {"p2p_bytes_per_s": 0.2, "connections": PER_VALUE},
    {"host_copy_bytes_per_s": 0.5},
    {"flow_bytes_per_s": 0.5, "ring_bytes_per_s": 0.3, "p2p_bytes_per_s": 0.2, "host_copy_bytes_per_s": 1.0},
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(("kind", "seed"), [("random", 3), ("CNN-like", 7), ("RNN-like", 7)])
def test_floors_hold_with_limited_levels(kind: str, seed: int, limits: dict[str, Any]) -> None:
    free = instance(kind, seed).request
    made = Planner(limited(free, **limits), MODE)
    floors, before = Floors(made), Floors(Planner(free, MODE))
    all_of_them = list(every_plan(made))
    every = all_of_them[:: max(1, len(all_of_them) // 40)]
    raised = equal = 0
    for each in every:
        sketch = Sketch(each.stages, each.devices, each.depth)
        floor_s = floors.floor_s(sketch)
        simulated = made.with_prediction(made.estimate("", each.stages, each.devices, depth=each.depth))
        assert before.floor_s(sketch) <= floor_s <= simulated.minibatch_s * (1 + 1e-3)
        raised += floor_s > 1.01 * before.floor_s(sketch)
        equal += simulated.minibatch_s == pytest.approx(floor_s, rel=1e-2)
    assert raised >= 1
    assert equal >= 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize(("kind", "seed"), [("CNN-like", 6), ("random", 4)])
def test_the_best_of_all_plans_is_found_with_limited_levels(kind: str, seed: int, limits: dict[str, Any]) -> None:
    made = Planner(limited(instance(kind, seed).request, **limits), MODE)
    found = made.best()
    best, _ = best_plan(made, found.minibatch_s)
    assert best is None or found.minibatch_s <= 1.01 * best.minibatch_s


@pytest.mark.parametrize("idle", [0, 2])
@pytest.mark.parametrize("replicas", [(1,), (3,), (1, 2), (2, 1, 3), (1, 1, 1, 1)])
def test_neighbours_are_complete_plans_on_at_most_all_workers(replicas: tuple[int, ...], idle: int) -> None:
    ends = [*range(3, 3 * len(replicas), 3), 13]
    stages = tuple(SearchStage(a, b, m) for (a, b), m in zip(pairwise([0, *ends]), replicas, strict=True))
    num_workers = sum(replicas) + idle
    for each in neighbours(along_devices(stages, 2), num_workers):
        assert [each.stages[0].start, each.stages[-1].stop] == [0, 13]
        assert all(a.stop == b.start for a, b in pairwise(each.stages))
        assert all(stage.start < stage.stop and stage.replicas >= 1 for stage in each.stages)
        devices = [device for own in each.devices for device in own]
        assert sorted(devices) == list(range(len(devices)))
        assert tuple(map(len, each.devices)) == each.replicas
        assert len(devices) <= num_workers


def test_one_more_is_in_flight_only_if_that_hides_transfers() -> None:
    def best(asked: Request) -> PlanEstimate:
        return planner("pipedream", asked).best()

    heavy = request([0.1] * 8, weights=100_000_000)
    fast, slow = best(heavy), best(slow_links(heavy))
    assert fast.plan.depth <= fast.plan.noam
    assert slow.plan.depth == slow.plan.noam + 1
    asked = replace(slow_links(heavy), depth=slow.plan.noam)
    assert best(asked).plan.depth == slow.plan.noam
    assert best(asked).minibatch_s > 1.01 * slow.minibatch_s


def test_found_plans_fit_in_memory_and_do_not_divide_streams() -> None:
    free = slow_links(request([0.1, 0.2, 0.1, 0.3] * 3))
    needed = planner("pipedream", free).best().memory_bytes
    tight = replace(free, cluster=replace(free.cluster, memory_bytes=int(needed) - 1))
    assert planner("pipedream", tight).best().memory_bytes < needed
    for streams in (1, 2, 3):
        found = planner("pipedream", replace(free, streams=streams)).best()
        assert all(streams % m == 0 for m in found.plan.replicas)


def test_the_plan_is_deterministic_and_without_a_budget_the_searches_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = instance("random", 6).request
    first, second = (Planner(asked, MODE).best() for _ in range(2))
    assert first == second
    monkeypatch.setattr(climb, "BUDGET", 0)
    searched = Planner(asked, MODE).best()
    assert "improved" not in searched.found_by
    assert searched.minibatch_s > first.minibatch_s


def test_the_budget_bounds_how_much_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the model and the cluster: bounds and simulations are charged, and stop with the budget."""
    weighed: list[Sketch] = []
    whole = Floors.floor_s

    def floor_s(self: Floors, sketch: Sketch) -> float:
        weighed.append(sketch)
        return whole(self, sketch)

    monkeypatch.setattr(Floors, "floor_s", floor_s)
    monkeypatch.setattr(climb, "BUDGET", 1500)
    levels = (Level("server", 8, 1e10, 1e-6), Level("cluster", 4, 1e9, 1e-5))
    Planner(Request(chain(150, 1), Cluster("two levels", "unit", None, levels), request([0.1]).model, 1), MODE).best()
    # The least that a lower bound is charged, see below
    assert 0 < sum(2 * len(sketch.replicas) + sum(sketch.replicas) for sketch in weighed) / 3 <= climb.BUDGET


def test_nothing_is_improved_where_no_plan_takes_any_time() -> None:
    asked = request([0.0] * 4)
    rows = [replace(row, output_bytes=0, gradient_bytes=0, parameter_sizes={}) for row in asked.profile.layers[8]]
    found = Planner(replace(asked, profile=replace(asked.profile, layers={8: tuple(rows)})), MODE).best()
    assert (found.minibatch_s, "improved" in found.found_by) == (0.0, False)


def test_the_charge_of_a_floor_is_a_third_of_an_instruction_per_part() -> None:
    """Of two ends per stage, of every replica, and of every layer over the stages' ends; measured, see `BUDGET`."""
    made = planner("pipedream", request([0.1, 0.2, 0.3, 0.1] * 2))
    sketch = Sketch(STRAIGHT, ((0,), (1,), (2,), (3,)), 4)
    assert climb._Climb(made)._floor_cost(sketch) == pytest.approx((2 * 4 + 4 + 9 / 8) / 3)


def test_the_chosen_plan_has_a_full_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """However wrong estimates are: plans that only seem fast are dropped, and the chosen plan has a real prediction."""
    made = Planner(instance("random", 6).request, MODE)
    proposed_s = min(each.minibatch_s for each in made.proposed())
    monkeypatch.setattr(Planner, "estimate_rate", lambda *_: (1e-9, 100))
    found = made.best()
    assert found.minibatch_s <= proposed_s
    assert found.is_simulated
    assert made.estimate_of(found.plan).minibatch_s == found.minibatch_s


def test_a_short_estimate_is_about_right() -> None:
    made = planner("pipedream", slow_links(request([0.1, 0.2, 0.3, 0.1] * 2)))
    for depth in (noam((1,) * 4), noam((1,) * 4) + 1):
        asked = made.estimate("", STRAIGHT, depth=depth)
        seconds, taken = made.estimate_rate(asked, 2000)
        assert seconds == pytest.approx(made.with_prediction(asked).minibatch_s, rel=0.02)
        assert 0 < taken <= 2000
        assert made.estimate_rate(asked, 10) == (float("inf"), 10)  # says nothing yet
