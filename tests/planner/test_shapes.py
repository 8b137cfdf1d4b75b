"""Plans of the shapes that some modes ask for: equally wide stages, and several stages per worker."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.memory import in_flight_interleaved
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.planner.searches import Searches
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import MODES

MB = 1_000_000


def request(
    seconds: Sequence[float], num_workers: int = 4, *, weights: int = MB, memory_bytes: int | None = None, size: int = 8
) -> Request:
    rows = [
        LayerProfile(
            f"layer{i}", "Linear", s, 2 * s, MB, MB, (i - 1,) if i else (), ("x",) if i == 0 else (),
            {f"w{i}": weights}, saved_bytes=MB,
        )
        for i, s in enumerate(seconds)
    ]  # fmt: skip
    rows.append(LayerProfile("loss", "loss", 0.0, 0.0, 8, 8, (len(seconds) - 1,)))
    parts = {n: tuple(_part(row, n / size) for row in rows) for n in (size, size // 4, size // 8)}
    profile = Profile("chain", "unit", "file", "chain", parts, 0.0, 0.0, dict.fromkeys(parts, 0.0), {})
    cluster = Cluster("flat", "unit", memory_bytes, (Level("server", num_workers, 1e10, 1e-6),))
    return Request(profile, cluster, COST_MODELS["overlap"], size, microbatches=4)


def _part(row: LayerProfile, share: float) -> LayerProfile:
    return replace(row, forward_s=row.forward_s * share, backward_s=row.backward_s * share)


def planner(mode: str, asked: Request) -> Planner:
    return Planner(asked, mode)


def unlimited(made: Planner) -> list[PlanEstimate]:
    return list(Searches(made, lambda _search: None).candidates(None))


def candidates(mode: str, asked: Request) -> list[PlanEstimate]:
    return unlimited(planner(mode, asked))


@pytest.mark.parametrize("num_workers", [1, 2, 4, 6])
def test_2bw_takes_equally_wide_stages_and_the_best_of_them(num_workers: int) -> None:
    made = planner("pipedream-2bw", request([0.1] * 12, num_workers))
    found = unlimited(made)
    assert all(len({*each.plan.replicas}) == 1 for each in found)
    assert {each.plan.replicas[0] for each in found} == {w for w in range(1, num_workers + 1) if num_workers % w == 0}
    best = made.best()
    assert best.minibatch_s == min(made.with_prediction(each).minibatch_s for each in found)
    assert best.is_simulated


def test_2bw_has_no_more_in_flight_than_an_update_covers() -> None:
    asked = replace(request([0.1] * 12), accumulate=2)
    other = planner("pipedream-2bw", asked).best()  # what is asked is about another mode
    assert other.accumulate == other.plan.depth == other.plan.noam
    found = unlimited(planner("pipedream-2bw", replace(asked, row=MODES["pipedream-2bw"])))
    assert all((each.accumulate, each.plan.depth) == (2, min(2, each.plan.noam)) for each in found)


def test_2bw_keeps_two_versions_for_any_number_in_flight() -> None:
    made = planner("pipedream-2bw", request([0.1] * 4))
    straight = next(each for each in unlimited(made) if str(each.plan) == "straight")
    stashing = planner("pipedream", request([0.1] * 4)).for_replicas([1, 1, 1, 1], [1, 2, 3])
    saved = [stashing.stages[s].memory_bytes - straight.stages[s].memory_bytes for s in range(4)]
    assert saved == [pytest.approx(versions * MB) for versions in (2, 1, 0, -1)]  # of 4, 3, 2 and 1 stashed versions


def test_every_worker_of_an_interleaved_plan_has_equally_many_stages() -> None:
    for found in candidates("interleaved", request([0.1] * 16)):
        plan = found.plan
        assert plan.chunks == 2
        assert len(plan.stages) == 2 * len(plan.positions)
        for first, second in zip(plan.stages, plan.stages[len(plan.positions) :], strict=False):
            assert (first.replicas, first.devices) == (second.replicas, second.devices)
    best = planner("interleaved", request([0.1] * 16)).best()
    assert best.is_simulated


def test_straight_on_4_workers_with_2_chunks_is_8_stages_cut_best() -> None:
    seconds = [0.1, 0.1, 0.1, 0.4, 0.1, 0.2, 0.1, 0.1, 0.1, 0.3, 0.1, 0.1]
    found = [each for each in candidates("interleaved", request(seconds)) if len(each.plan.stages) == 8]
    straight = next(each for each in found if str(each.plan) == "straight")
    assert straight.plan.devices == (0, 1, 2, 3)
    assert [stage.devices for stage in straight.plan.stages] == [(d,) for d in (0, 1, 2, 3)] * 2
    bounds = ([0, *cuts, 12] for cuts in itertools.combinations(range(1, 12), 7))
    least_s = min(max(sum(seconds[a:b]) for a, b in itertools.pairwise(each)) for each in bounds)
    own = [sum(seconds[stage.start : stage.stop]) for stage in straight.plan.stages]
    assert max(own) == pytest.approx(least_s)


def test_a_worker_s_memory_is_that_of_all_its_stages_and_decides() -> None:
    free = candidates("interleaved", request([0.1] * 16))
    deep = next(each for each in free if len(each.plan.stages) == 8)
    per_worker = [sum(deep.stages[s].memory_bytes for s in (p, p + 4)) for p in range(4)]
    assert deep.memory_bytes == max(per_worker)
    tight = planner("interleaved", request([0.1] * 16, memory_bytes=int(deep.memory_bytes)))
    assert tight.best().memory_bytes <= deep.memory_bytes
    with pytest.raises(PlanError, match=r"no plan of mode interleaved fits: the leanest found needs .* on a worker"):
        planner("interleaved", request([0.1] * 16, memory_bytes=MB)).best()


def test_stages_of_two_per_worker_take_their_share_of_memory_where_the_best_cuts_do_not_fit() -> None:
    """The best cuts give one worker two layers and the other eight; three layers per stage fit both."""
    seconds = [0.4, 0.1, 0.1, 0.1, 0.1] * 2
    (free,) = candidates("interleaved", request(seconds, 2, weights=100 * MB))
    assert [stage.stop - stage.start for stage in free.plan.stages] == [1, 4, 1, 4]
    limit_bytes = int(0.8 * free.memory_bytes)
    best = planner("interleaved", request(seconds, 2, weights=100 * MB, memory_bytes=limit_bytes)).best()
    assert best.memory_bytes <= limit_bytes
    assert [stage.stop - stage.start for stage in best.plan.stages] == [2, 3, 2, 3]


def test_microbatches_in_flight_where_workers_have_several_stages() -> None:
    """2 workers of 2 stages: as many as there are of one group, then those that the next group adds."""
    assert in_flight_interleaved("interleaved", 2, 2, 2) == [2, 2, 2, 1]
    assert in_flight_interleaved("interleaved", 2, 2, 4) == [4, 3, 2, 1]
    assert in_flight_interleaved("interleaved", 1, 1, 4) == [1]
    assert in_flight_interleaved("all-forwards", 2, 2, 4) == [4, 4, 4, 4]


def test_modes_that_ask_for_a_shape_are_in_the_table() -> None:
    assert (MODES["pipedream-2bw"].shape, MODES["pipedream-2bw"].weight_sets) == ("equal", 2)
    assert MODES["interleaved"].chunks > 1
