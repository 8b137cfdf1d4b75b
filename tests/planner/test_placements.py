"""Placements of a given plan's workers: all that differ are listed, and a clearly faster one is taken."""

import itertools
import math
from collections.abc import Sequence

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.placement_costs import along, placed_s
from pipebench.planner.placements import placements
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.profile.model import LayerProfile, Profile
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.train.prepare import prepare

MB = 10**6


def cluster(*counts: int) -> Cluster:
    """Return levels of so many components, innermost first, each ten times slower than the one inside."""
    levels = [Level(f"level{i}", count, 1e10 / 10**i, 1e-5) for i, count in enumerate(counts)]
    return Cluster("test", "unit", None, tuple(levels))


def planner(
    where: Cluster, layers: Sequence[tuple[int, int]], model: str = "overlap", mode: str = "pipedream"
) -> Planner:
    """Return a planner of a chain of layers, given as (bytes of weights, bytes of output); each takes 10 ms."""
    rows = [
        LayerProfile(
            *(f"layer{i}", "Linear", 3e-3, 7e-3, output_bytes, output_bytes),
            reads=(i - 1,) if i else (),
            parameter_sizes={f"w{i}": weights} if weights else {},
        )
        for i, (weights, output_bytes) in enumerate(layers)
    ]
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, reads=(len(rows) - 1,))
    profile = Profile("chain", "unit", "file", "", {1: (*rows, loss)}, 0.0, 0.0, {}, {})
    return Planner(Request(profile, where, COST_MODELS[model], 1), mode)


def given(
    where: Cluster, replicas: Sequence[int], layers: Sequence[tuple[int, int]], mode: str = "pipedream"
) -> PlanEstimate:
    return planner(where, layers, mode=mode).for_replicas(replicas, range(1, len(replicas)))


def brute_force(where: Cluster, count: int) -> list[tuple[int, ...]]:
    """Return every way to give workers devices, but for the order inside servers and of equal servers."""
    seen, found = set(), []
    size = where.levels[0].count
    for devices in itertools.permutations(range(count)):
        servers = [frozenset(w for w in range(count) if devices[w] // size == s) for s in range(-(-count // size))]
        if frozenset(servers) not in seen:
            seen.add(frozenset(servers))
            found.append(devices)
    return found


@pytest.mark.parametrize(
    ("counts", "replicas"),
    [((8,), (2, 1, 1)), ((4, 2), (2, 1, 1)), ((1, 4), (2, 1, 1)), ((4, 1), (2, 2)), ((2, 2), (4,)), ((4, 4), (15, 1))],
    ids=["one level", "in one server", "servers of one", "one server", "one stage", "15-1"],
)
def test_equivalent_placements_leave_nothing_to_choose(counts: tuple[int, ...], replicas: tuple[int, ...]) -> None:
    """Where only names of servers and minibatches differ, workers stand along the devices; so do the published 15-1."""
    assert [[*map(tuple, along(replicas))]] == placements(cluster(*counts), replicas)


COUNTS = [(2, 4), (4, 2), (2, 2, 2), (8, 4), (4, 64)]
REPLICAS = [(3, 1, 1), (2, 2, 2), (3, 3), (4, 2, 1, 1), (1,) * 8, (5, 3), (10, 4, 2), (1,) * 16]


@pytest.mark.parametrize(
    ("counts", "replicas"), [(c, r) for c in COUNTS for r in REPLICAS if sum(r) <= math.prod(c)], ids=str
)
def test_every_placement_takes_the_first_devices_once(counts: tuple[int, ...], replicas: tuple[int, ...]) -> None:
    where = cluster(*counts)
    found = placements(where, replicas)
    assert found[0] == [*map(tuple, along(replicas))]
    assert len({tuple(each) for each in found}) == len(found)
    for placement in found:
        assert [len(own) for own in placement] == [*replicas]
        assert sorted(itertools.chain(*placement)) == list(range(sum(replicas)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("counts", "replicas"),
    [
        ((2, 2), (2, 1, 1)),
        ((2, 2), (2, 2)),
        ((2, 3), (2, 3)),
        ((3, 2), (1, 3, 2)),
        ((2, 3), (4, 2)),
        ((4, 2), (4, 1, 1)),
    ],
)
@pytest.mark.parametrize("model", sorted(COST_MODELS))
def test_no_placement_beats_those_listed(counts: tuple[int, ...], replicas: tuple[int, ...], model: str) -> None:
    where = cluster(*counts)
    for layers in itertools.product([(0, 90 * MB), (200 * MB, MB)], repeat=len(replicas)):
        made = planner(where, layers, model)
        stages = made._given_stages(replicas, range(1, len(replicas)))

        def bottleneck_s(devices: Sequence[Sequence[int]]) -> float:
            return made.estimate("", stages, devices).bottleneck_s  # noqa: B023

        ends = along(replicas)
        everything = [[devices[own.start : own.stop] for own in ends] for devices in brute_force(where, sum(replicas))]
        assert min(map(bottleneck_s, placements(where, replicas))) == pytest.approx(min(map(bottleneck_s, everything)))


def test_replicas_that_exchange_much_share_a_server() -> None:
    """Two stages of 4 on two servers of 4, activations larger than weights: both are in both servers."""
    plan = given(cluster(4, 2), (4, 4), [(MB, 90 * MB), (MB, 0)])
    assert [stage.devices for stage in plan.plan.stages] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    made = planner(cluster(4, 2), [(MB, 90 * MB), (MB, 0)])
    straight = made.with_prediction(made.estimate("", made._given_stages((4, 4), [1])))
    assert plan.minibatch_s < 0.9 * straight.minibatch_s


def test_replicas_of_a_stage_with_many_weights_share_a_server() -> None:
    """1-4-3: along the devices, the wide stage in the middle is in two servers and sums its gradients between them."""
    plan = given(cluster(4, 2), (1, 4, 3), [(0, MB), (200 * MB, MB), (0, 0)])
    assert len({device // 4 for device in plan.plan.stages[1].devices}) == 1


def test_stages_with_many_weights_and_little_to_send_stay_along_the_devices() -> None:
    plan = given(cluster(4, 2), (4, 4), [(200 * MB, MB), (200 * MB, 0)])
    assert plan.plan.devices == tuple(range(8))


def test_a_cut_with_little_to_send_is_where_the_server_ends() -> None:
    """A straight plan of 4 on servers of 2: the heavy pair in the middle shares one."""
    plan = given(cluster(2, 2), (1, 1, 1, 1), [(0, MB), (0, 90 * MB), (0, MB), (0, 0)])
    assert plan.plan.devices[1] // 2 == plan.plan.devices[2] // 2
    flushed = given(cluster(2, 2), (1, 1, 1, 1), [(0, MB), (0, 90 * MB), (0, MB), (0, 0)], "pipedream-flush")
    assert flushed.plan.devices[1] // 2 == flushed.plan.devices[2] // 2


@pytest.mark.parametrize(("switch", "network", "port_s"), [(1e7, 1e9, 1.5), (1e9, 1e7, 2.1)])
def test_a_port_carries_only_the_traffic_of_its_level(switch: float, network: float, port_s: float) -> None:
    """Two servers of two switches of two: what goes to another server crosses the servers' ports only.

    A stage of 40 MB on 0, 1, 2 and 4 sums in a ring, 15 MB per minibatch over each hop: 1 to 2 joins
    switches, 2 to 4 and 4 to 0 servers. It sends 8 MB to device 6, three quarters from the other server: 15 + 6 MB
    leave that. 0.2.0 counted 19 MB at the first switch's port, including traffic that leaves its server.
    """
    levels = [Level(str(rate), 2, rate, 0.0) for rate in (1e10, switch, network)]
    made = planner(Cluster("three levels", "unit", None, tuple(levels)), [(40 * MB, 8 * MB), (0, 0)])
    stages, devices = made._given_stages((4, 1), [1]), [(0, 1, 2, 4), (6,)]
    assert placed_s(made.work, made.request.model, made.request.cluster, stages, devices)[1] == pytest.approx(port_s)


def test_a_little_faster_is_not_worth_another_order() -> None:
    """Transfers are hidden behind the computing: every placement is as fast."""
    assert given(cluster(2, 2), (1, 1, 1, 1), [(0, 10), (0, 1000), (0, 10), (0, 0)]).plan.devices == (0, 1, 2, 3)


def test_a_cut_that_the_cost_model_does_not_know_leaves_workers_along_the_devices() -> None:
    assert planner(cluster(2, 2), [(0, MB), (0, MB)]).devices_of((2, 2), [7]) == (0, 1, 2, 3)


def test_explicit_devices_of_a_recipe_are_used() -> None:
    words = ["parallelism.plan=8-8", "engine.kind=simulated"]
    recipe = load("alexnet/4x4-a-pipedream", words).recipe
    setup = prepare(recipe, load_cluster("cluster-a", 4), trains=False).setup
    assert setup.devices == (0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)
    flat = load("quickstart", ["parallelism.plan=2-1-1", "engine.kind=simulated"]).recipe
    assert prepare(flat, load_cluster("local", 1), trains=False).setup.devices == (0, 1, 2, 3)
