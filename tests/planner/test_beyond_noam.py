"""Costs and gains of a depth beyond NOAM in the planner, against the recurrence and PipeDream's Figure 18."""

from dataclasses import replace

import pytest

from pipebench.errors import PlanError
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate
from pipebench.recipe.load import load
from pipebench.schedule.modes import MODES
from pipebench.train.profiled_model import Wanted, profile_model
from pipebench.train.request import plan_request
from tests.oracles import staleness
from tests.planner.test_shapes import MB, planner, request
from tests.recipe.test_published import entries


def straight(depth: int | None, mode: str = "pipedream") -> PlanEstimate:
    return planner(mode, replace(request([0.1] * 4), depth=depth)).for_replicas([1, 1, 1, 1], [1, 2, 3])


def test_a_stage_keeps_a_version_and_activations_per_additional_minibatch() -> None:
    usual, deeper = straight(None), straight(6)
    assert [stage.in_flight for stage in usual.stages] == [4, 3, 2, 1]
    assert [stage.in_flight for stage in deeper.stages] == [6, 5, 4, 1]
    more = [b.memory_bytes - a.memory_bytes for a, b in zip(usual.stages, deeper.stages, strict=True)]
    assert more == [2 * 2 * MB] * 3 + [0]  # weights 1 MB and saved 1 MB of each of two minibatches


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 2, 1), (3, 1), (1, 1, 2)])
@pytest.mark.parametrize("beyond", [1, 2, 5])
def test_in_flight_of_replicated_plans_is_the_recurrence_s(replicas: tuple[int, ...], beyond: int) -> None:
    depth = -(-sum(replicas) // replicas[0]) + beyond
    found = planner("pipedream", replace(request([0.1] * 6), depth=depth)).for_replicas(replicas)
    assert [stage.in_flight for stage in found.stages] == staleness.depths(replicas, depth)


def test_with_a_flush_no_more_is_in_flight_than_an_update_has() -> None:
    assert [stage.in_flight for stage in straight(7, "pipedream-flush").stages] == [4, 4, 4, 1]  # 4 microbatches


@pytest.mark.parametrize(
    ("mode", "replicas", "microbatches", "in_flight"),
    [
        ("gpipe", (3, 1), 4, [4, 12]),  # of three minibatches an update, one on each replica of stage 0
        ("gpipe", (1, 2, 3), 4, [24, 12, 8]),
        ("zero-bubble", (3, 1, 3), 4, [3, 4, 3]),  # d_1 is 4, more than the depth
        ("zero-bubble", (1, 1, 1, 3), 1, [3, 3, 3, 1]),
        ("pipedream-flush", (1,) * 6, 4, [4, 4, 4, 3, 2, 1]),
    ],
)
def test_with_a_flush_a_replica_has_its_share_of_units_in_flight(
    mode: str, replicas: tuple[int, ...], microbatches: int, in_flight: list[int]
) -> None:
    asked = replace(request([0.1] * 12, sum(replicas)), microbatches=microbatches, accumulate=1)
    found = planner(mode, asked).for_replicas(replicas)
    assert [stage.in_flight for stage in found.stages] == in_flight


def test_the_search_counts_the_memory_of_a_depth_beyond_noam() -> None:
    free = replace(request([0.1] * 12), depth=7)
    kept = planner("pipedream", free).best()
    tight = replace(free, cluster=replace(free.cluster, memory_bytes=int(kept.memory_bytes) - 1))
    found = planner("pipedream", tight).best()
    assert found.plan.depth == 7
    assert found.memory_bytes < kept.memory_bytes
    least = replace(free, cluster=replace(free.cluster, memory_bytes=14 * MB))
    Planner(replace(least, depth=None), "pipedream").best()
    with pytest.raises(PlanError, match=r"the leanest needs .* more than .*parallelism\.depth: auto"):
        Planner(least, "pipedream").best()


def test_every_mode_that_takes_a_depth_is_planned_beyond_noam() -> None:
    for name, row in MODES.items():
        if row.depth is None:
            asked = replace(request([0.1] * 12), depth=6)
            found = planner(name, asked).best()
            assert found.plan.depth == 6
            # Of stages that share workers, the bottleneck has the transfers that hand-overs within a worker don't make.
            assert found.minibatch_s >= (0.999 if row.chunks == 1 else 0.99) * found.bottleneck_s


def test_figure_18_of_pipedream() -> None:
    """GNMT-8 on four V100: memory grows with depth, all fits in 16 GB, and 4 and 7 are the best depths of 2 to 7.

    Bars and curves are not in the paper's text; the numbers in it are compared.
    """
    said = entries()["s55-depth"]
    assert (said["NOAM"], said["best_depths"], said["memory"]) == (4, [4, 7], "grows with depth")
    loaded = load("recipes/gnmt8/1x4-a-pipedream.yaml", ["parallelism.plan=straight"])
    made = profile_model(loaded.recipe, loaded.cluster, wanted=Wanted(plans=True))
    asked = plan_request(loaded.recipe, loaded.cluster, made.profile, made.dataset)
    first, last = said["depth_range"]
    found = {
        depth: Planner(replace(asked, depth=depth), "pipedream").for_replicas([1, 1, 1, 1])
        for depth in range(first, last + 1)
    }
    memory = {depth: [stage.memory_bytes for stage in each.stages] for depth, each in found.items()}
    for depth in range(3, 8):
        pairs = list(zip(memory[depth - 1], memory[depth], strict=True))
        assert all(deeper >= shallower for shallower, deeper in pairs)
        grown = [deeper > shallower for shallower, deeper in pairs]
        assert grown[0]
        assert grown == [True, True, True, False] or depth <= said["NOAM"]
    assert max(memory[7]) < said["gpu_memory_gb"] * 1e9
    rates = {depth: 1 / each.minibatch_s for depth, each in found.items()}
    best = sorted(rates, key=rates.__getitem__)[-1]
    assert min(rates[depth] for depth in said["best_depths"]) > 0.98 * rates[best]
    assert rates[2] < 0.5 * rates[4]
