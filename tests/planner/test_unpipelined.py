"""Plans for modes without pipelining, against brute force."""

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.planner.flat import FlatProblem, stage_s
from pipebench.planner.planner import Planner
from pipebench.planner.unpipelined import plans_unpipelined
from tests.oracles import planning
from tests.planner.problems import MODELS, Case, as_set, cases, levels, link
from tests.planner.test_shapes import request, unlimited


def every_sum(case: Case, where: planning.Link) -> Iterator[tuple[int, float]]:
    """Yield the first stage's replicas and the sum over the stages of every plan whose other widths divide them."""
    search = case.search

    def later(start: planning.State, first: int, left: int, total_s: float) -> Iterator[float]:
        if start == search.given.whole:
            yield total_s
        for stop in search.states:
            for m in range(1, left + 1):
                if start < stop and first % m == 0 and search.given.fits(start, stop, m, Fraction(0), search.memory):
                    own_s = search.given.stage_s(start, stop, m, where, first=False, inner=None)
                    yield from later(stop, first, left - m, total_s + own_s)

    for stop in search.states - {planning.EMPTY}:
        for m in range(1, where.size + 1):
            if search.given.fits(planning.EMPTY, stop, m, Fraction(0), search.memory):
                own_s = search.given.stage_s(planning.EMPTY, stop, m, where, first=True, inner=None)
                for total_s in later(stop, m, where.size - m, own_s):
                    yield m, total_s


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_plan_of_that_width_has_a_smaller_sum(model: str, data: st.DataObject) -> None:
    case, num_workers = data.draw(cases(model, max_layers=5)), data.draw(st.integers(1, 6))
    if case.memory is not None:  # nothing is pipelined: one minibatch in flight
        rule = case.search.memory._replace(in_flight=1, depth_at_most=None)  # type: ignore[union-attr]
        memory = replace(case.memory, in_flight=1, depth_at_most=None)
        case = replace(case, memory=memory, search=replace(case.search, memory=rule))
    level = data.draw(levels(num_workers))
    problem = FlatProblem(case.work, case.model, level, num_workers, case.memory)
    least: dict[int, float] = {}
    for width, total_s in every_sum(case, link(level)):
        least[width] = min(least.get(width, math.inf), total_s)
    found = {plan[0].replicas: plan for plan in plans_unpipelined(problem)}
    assert set(found) == set(least)
    for width, plan in found.items():
        assert sum(stage_s(problem, stage) for stage in plan) == pytest.approx(least[width], rel=1e-9)
        assert (plan[0].start, as_set(case.states.members[plan[-1].stop])) == (0, case.search.given.whole)
        assert all(width % stage.replicas == 0 for stage in plan)
        assert sum(stage.replicas for stage in plan) <= num_workers


def test_hybrid_keeps_a_heavy_end_on_one_worker() -> None:
    """As published plans do: a layer whose gradients cost more to sum than it costs to compute isn't replicated."""
    asked = request([0.01] * 8 + [0.001], 4, weights=1000)
    rows = {
        size: (*layers[:8], replace(layers[8], parameter_sizes={"w8": 4 * 10**9}), layers[9])
        for size, layers in asked.profile.layers.items()
    }
    made = Planner(replace(asked, profile=replace(asked.profile, layers=rows)), "hybrid")
    best = made.best()
    assert best.is_simulated
    assert best.plan.replicas == (3, 1)
    assert best.plan.depth == 1
    assert best.accumulate == 1
    assert best.minibatch_s == min(made.with_prediction(each).minibatch_s for each in unlimited(made))


def test_only_replicas_overlap() -> None:
    """Straight, hybrid takes as long as model parallelism; in two halves, half of that, and the sums on top."""
    asked = request([0.1] * 4, 4)
    straight, model = (Planner(asked, mode).for_replicas([1] * 4) for mode in ("hybrid", "model"))
    assert straight.minibatch_s == model.minibatch_s == pytest.approx(4 * 0.3, rel=1e-2)
    halves = Planner(asked, "hybrid").for_replicas([2, 2])
    assert halves.minibatch_s == pytest.approx(2 * 0.3, rel=1e-2)
