"""Searches over very many places to cut: how good their plans are, and whether their bounds hold."""

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipebench.cluster import Cluster, Level
from pipebench.planner import coarsening
from pipebench.planner.compare import compare
from pipebench.planner.cost_models import COST_MODELS, UnitWork
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.flat import FlatProblem, SearchStage, bottleneck_s, flat_bound_s, plan_flat
from pipebench.planner.hierarchical import HierarchicalProblem, hierarchical_bound_s, plan_hierarchical
from pipebench.planner.memory import MemoryRule
from pipebench.planner.placement_costs import along, placed_s
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.planner.state_graph import antichains, prefixes
from pipebench.profile.model import LayerProfile, Profile
from tests.planner.problems import MODELS, cases, chain, levels
from tests.planner.test_artifact import graph, inception

SERVERS = (Level("server", 4, 1e10, 1e-5), Level("cluster", 4, 1e9, 1e-5))
NEAR = 1.03  # times the smallest bottleneck; 1.01 was the worst seen


@pytest.fixture
def coarsen_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarsen beyond 100 states already, to a fifth of the usual number."""
    numbers = {"MOST_EXACT": 100, "_MOST_EXACT_BRANCHES": 50, "NUM_GROUPS": 200}
    for name, value in {**numbers, "_COARSE": 100, "_BACKDROP": 50, "_FINE": 80}.items():
        monkeypatch.setattr(coarsening, name, value)


def _exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_EXACT", "_MOST_EXACT_BRANCHES"):
        monkeypatch.setattr(coarsening, name, 10**9)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("coarsen_early")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("width", [None, 1])
@pytest.mark.parametrize("seed", range(3))
def test_flat_plans_are_near_the_exact_ones(
    model: str, width: int | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = UnitWork(prefixes(chain(400, seed)), 1e-11, 1e-5, 1e-4)
    problem = FlatProblem(work, COST_MODELS[model], SERVERS[1], 16, None, width)
    plan, bound_s = plan_flat(problem), flat_bound_s(problem)
    assert plan is not None
    assert (plan[0].start, plan[-1].stop) == (0, 400)
    _exactly(monkeypatch)
    exact = plan_flat(problem)
    assert exact is not None
    exact_s = bottleneck_s(problem, exact)
    assert bound_s <= exact_s * (1 + 1e-9)
    assert exact_s * (1 - 1e-9) <= bottleneck_s(problem, plan) <= NEAR * exact_s
    assert bottleneck_s(problem, plan) / bound_s < 1.1


@pytest.mark.usefixtures("coarsen_early")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_plans_on_two_levels_are_near_the_exact_ones(model: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = UnitWork(prefixes(chain(250, seed)), 1e-11, 1e-5, 1e-4)
    problem = HierarchicalProblem(work, COST_MODELS[model], SERVERS)
    plan, bound_s = plan_hierarchical(problem), hierarchical_bound_s(problem)
    assert plan is not None
    assert (plan.stages[0].start, plan.stages[-1].stop) == (0, 250)
    _exactly(monkeypatch)
    exact = plan_hierarchical(problem)
    assert exact is not None
    assert bound_s <= exact.bottleneck_s * (1 + 1e-9)
    assert exact.bottleneck_s * (1 - 1e-9) <= plan.bottleneck_s <= NEAR * exact.bottleneck_s


@pytest.mark.usefixtures("coarsen_early")
@pytest.mark.parametrize("model", ["artifact", "sosp19"])
def test_plans_of_a_wide_graph_are_near_the_exact_ones(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = UnitWork(antichains(graph(inception(4, (1, 2, 3)), 0)))
    assert not work.states.is_chain
    assert len(work.states) > 90
    problem = FlatProblem(work, COST_MODELS[model], SERVERS[1], 8)
    plan, bound_s = plan_flat(problem), flat_bound_s(problem)
    assert plan is not None
    members = work.states.members
    assert all(members[stage.start] & ~members[stage.stop] == 0 for stage in plan)
    _exactly(monkeypatch)
    exact = plan_flat(problem)
    assert exact is not None
    exact_s = bottleneck_s(problem, exact)
    assert bound_s <= exact_s * (1 + 1e-9)
    assert bottleneck_s(problem, plan) <= NEAR * exact_s


@pytest.mark.usefixtures("coarsen_early")
@pytest.mark.parametrize("replicas", [(3, 1), (1, 2, 1), (1,) * 4])
def test_given_replicas_are_cut_near_the_best_cuts(replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    work, cluster = UnitWork(prefixes(chain(400, 1))), Cluster("one", "V100", None, SERVERS[:1])

    def seconds() -> float:
        stages = plan_fixed(work, COST_MODELS["overlap"], cluster, replicas)
        assert [stage.replicas for stage in stages] == list(replicas)
        own_s, _ = placed_s(work, COST_MODELS["overlap"], cluster, stages, along(replicas))
        return max(own_s)

    found_s = seconds()
    _exactly(monkeypatch)
    assert found_s <= NEAR * seconds()


@pytest.mark.usefixtures("coarsen_early")
@pytest.mark.parametrize("seed", range(4))
def test_all_places_around_the_first_cut_are_searched(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work, cluster = UnitWork(prefixes(chain(400, seed))), Cluster("one", "V100", None, SERVERS[:1])
    found = plan_fixed(work, COST_MODELS["overlap"], cluster, (1, 1))
    _exactly(monkeypatch)
    assert found == plan_fixed(work, COST_MODELS["overlap"], cluster, (1, 1))


@pytest.mark.usefixtures("coarsen_early")
@pytest.mark.parametrize(("limit_bytes", "near"), [(0.9e9, 1.15), pytest.param(1.3e9, 1.05, marks=pytest.mark.slow)])
def test_memory_limits_bind_coarsened_searches_too(
    limit_bytes: float, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0.7 GB nothing fits. Near that, few cuts are as good as the best."""
    work = UnitWork(prefixes(chain(200, 2)))
    problem = FlatProblem(work, COST_MODELS["overlap"], SERVERS[1], 16, MemoryRule(limit_bytes))
    found = plan_flat(problem)
    assert found is not None
    assert problem.memory is not None
    assert problem.memory.fit_all(problem.work.states, found)
    _exactly(monkeypatch)
    exact = plan_flat(problem)
    assert exact is not None
    assert bottleneck_s(problem, found) <= near * bottleneck_s(problem, exact)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_no_plan_is_below_a_bound(model: str, data: Any) -> None:
    """Any model, groups of any size, one level or two, whatever memory there is."""
    case = data.draw(cases(model))
    counts = data.draw(st.sampled_from([(1, 3), (2, 2), (3, 2), (4, 1)]))
    clusters = tuple(data.draw(levels(count)) for count in counts)
    flat = FlatProblem(case.work, case.model, clusters[0], counts[0], case.memory)
    nested = HierarchicalProblem(case.work, case.model, clusters, case.memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coarsening, "NUM_GROUPS", data.draw(st.integers(1, 5)))
        flat_s, nested_s = flat_bound_s(flat), hierarchical_bound_s(nested)
    plan, nested_plan = plan_flat(flat), plan_hierarchical(nested)
    assert plan is None or flat_s <= bottleneck_s(flat, plan) * (1 + 1e-9)
    assert nested_plan is None or nested_s <= nested_plan.bottleneck_s * (1 + 1e-9)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("coarsen_early")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cluster", [SERVERS[1:], SERVERS])
def test_slow_layers_lie_between_groups_and_count_in_bounds(model: str, cluster: tuple[Level, ...]) -> None:
    """In groups of equally many states most of the time was inside one: the bound was a third below what was found."""
    draw, layers = random.Random(1), []
    for index in range(300):
        forward_s, size = draw.lognormvariate(-7, 3.5), int(draw.lognormvariate(12, 3.5))
        layers.append(
            LayerProfile(
                *(f"layer{index}", "Linear", forward_s, 2 * forward_s, size, size),
                reads=(index - 1,) if index else (),
                parameter_sizes={f"weight{index}": int(draw.lognormvariate(12, 3.5)) + 4},
            )
        )
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, reads=(299,))
    profile = Profile("chain", "random", "file", "random", {1: (*layers, loss)}, 0.0, 0.0, {1: 0.0}, {})
    made = Planner(Request(profile, Cluster("any", "V100", None, cluster), COST_MODELS[model], 1), "pipedream")
    made.best()
    assert made.at_most() <= (1.0 if len(cluster) == 1 else 1.01)


@pytest.mark.slow
def test_10_000_layers_on_two_levels_are_planned_in_seconds() -> None:
    rows = chain(10_000, seed=3)
    profile = Profile("chain", "random", "file", "random", {1: rows}, 0.0, 0.0, {1: 0.0}, {})
    request = Request(profile, Cluster("two", "random", None, SERVERS), COST_MODELS["artifact"], 1)
    reported: list[str] = []
    began_s = time.process_time()
    found = compare(request, on_search=reported.append)
    assert time.process_time() - began_s < 90.0  # no benchmark (nox -s bench is): only that it doesn't crawl
    assert found.best.plan.stages[-1].stop == 10_000
    assert found.num_states == 10_001
    assert 1.0 < found.at_most < 1.1
    assert "planning mode 2 of 2: pipedream, hierarchical" in reported
    assert {*found.took_s} == {"search", "simulation", "other modes"}


def test_stages_of_a_coarsened_search_stay_in_bounds() -> None:
    """More cuts than the states that are looked at near each: every stage still has layers of its own."""
    work = UnitWork(prefixes(chain(2500, 4)))
    plan = plan_flat(FlatProblem(work, COST_MODELS["sosp19"], Level("level", 600, 1e12, 0.0), 600, None, 1))
    assert plan is not None
    assert all(isinstance(stage, SearchStage) and stage.start < stage.stop for stage in plan)
