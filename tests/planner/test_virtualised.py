"""Plans whose stages choose their layers' policies fit and are the fastest."""

import itertools
import time
from dataclasses import replace

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.planner.compare import compare
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.profile.model import Profile
from pipebench.schedule.modes import KEEP, MODES, RECOMPUTE, SWAP
from tests.planner.problems import chain

MODES_THAT_CHOOSE = ("gpipe", "pipedream", "pipedream-flush")
LAYERS, WORKERS = 24, 6


def request(memory_bytes: int | None, pcie_bytes_per_s: float = 1e10, seed: int = 0) -> Request:
    """Return a chain of random layers on some workers of so much memory."""
    rows = [replace(row, output_bytes=row.output_bytes // 20, gradient_bytes=0) for row in chain(LAYERS, seed)]
    profile = Profile("chain", "drawn", "file", "drawn", {1: tuple(rows)}, 1e-11, 0.0, {}, {})
    cluster = Cluster("drawn", "drawn", memory_bytes, (Level("server", WORKERS, 1e10, 1e-5),))
    cluster = replace(cluster, pcie_bytes_per_s=pcie_bytes_per_s)
    return Request(profile, cluster, COST_MODELS["overlap"], 1, chooses=(SWAP, RECOMPUTE))


def roomy(mode: str, seed: int = 0) -> int:
    """Return the bytes of a straight plan's fullest worker if all layers keep."""
    free = Planner(request(None, seed=seed), mode)
    peaks = free.simulated_peaks(free.best())
    assert peaks is not None
    return max(peaks)


@pytest.mark.parametrize("mode", MODES_THAT_CHOOSE)
def test_without_a_limit_everything_is_kept(mode: str) -> None:
    best = Planner(request(None), mode).best()
    assert {policy for stage in best.plan.stages for policy in stage.memory} == {KEEP}
    assert set(best.plan.replicas) == {1}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES_THAT_CHOOSE)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.9, 0.75])
def test_chosen_policies_fit_in_the_simulator_too(mode: str, seed: int, share: float) -> None:
    limit = int(share * roomy(mode, seed))
    planner = Planner(request(limit, seed=seed), mode)
    best = planner.best()
    memory = tuple(itertools.chain(*(stage.memory for stage in best.plan.stages)))
    with_policies = Planner(replace(planner.request, memory=memory), mode)
    peaks = with_policies.simulated_peaks(best)
    assert peaks is not None
    assert max(peaks) <= limit
    assert best.is_simulated
    assert with_policies.estimate_of(best.plan).minibatch_s == pytest.approx(best.minibatch_s)


def test_a_plan_too_large_with_keep_becomes_possible() -> None:
    """At the depth that keeps a straight pipeline full; with fewer minibatches in flight it would do."""
    asked = request(int(0.45 * roomy("pipedream")))
    plain = replace(asked, chooses=(), row=replace(MODES["pipedream"], shape="straight"), depth=WORKERS)
    with pytest.raises(PlanError, match="no plan of mode pipedream fits"):
        Planner(plain, "pipedream").best()
    best = Planner(asked, "pipedream").best()
    assert best.plan.depth == WORKERS
    assert {policy for stage in best.plan.stages for policy in stage.memory} > {KEEP}


def test_more_policies_are_no_slower() -> None:
    limit = int(0.7 * roomy("pipedream"))
    seconds = {
        chooses: Planner(replace(request(limit), chooses=chooses), "pipedream").best().bottleneck_s
        for chooses in ((RECOMPUTE,), (SWAP, RECOMPUTE))
    }
    assert seconds[SWAP, RECOMPUTE] <= seconds[RECOMPUTE,] * (1 + 1e-9)


def test_gpipe_recomputes_no_more_than_necessary() -> None:
    vanilla = Planner(replace(request(None), chooses=()), "gpipe").best()
    assert {policy for stage in vanilla.plan.stages for policy in stage.memory} == {RECOMPUTE}
    best = Planner(request(int(0.9 * roomy("gpipe"))), "gpipe").best()
    assert best.bottleneck_s < vanilla.bottleneck_s


def test_an_error_says_that_nothing_fits() -> None:
    with pytest.raises(PlanError, match=r"stage \d of mode pipedream doesn't fit whatever its layers do: .* more than"):
        Planner(request(10**6), "pipedream").best()


def test_stages_are_recut_for_the_times_of_their_policies() -> None:
    """The first of a pipeline has most in flight and computes most again: it gives layers away."""
    asked = request(int(0.6 * roomy("pipedream")))
    best = Planner(asked, "pipedream").best()
    given = Planner(asked, "pipedream").for_replicas((1,) * WORKERS)
    assert best.found_by.endswith("repartitioned")
    assert best.bottleneck_s < given.bottleneck_s
    assert best.plan.stages[0].stop <= given.plan.stages[0].stop


def test_a_given_plan_chooses_too() -> None:
    limit = int(0.8 * roomy("pipedream"))
    planner = Planner(request(limit), "pipedream")
    starts = planner.starts_of((1,) * WORKERS)
    memory = planner.policies_of((1,) * WORKERS, starts)
    assert len(memory) == LAYERS
    given = planner.for_replicas((1,) * WORKERS, starts)
    assert tuple(itertools.chain(*(stage.memory for stage in given.plan.stages))) == memory
    assert given.memory_bytes <= limit


def test_modes_with_one_stage_or_several_per_worker_choose_nothing() -> None:
    comparison = compare(request(int(0.9 * roomy("pipedream"))), "pipedream")
    others = {each.plan.mode: each for each in comparison.others}
    assert {"interleaved", "zero-bubble"} & {*others}
    for name in {"interleaved", "zero-bubble", "dp"} & {*others}:
        assert {policy for stage in others[name].plan.stages for policy in stage.memory} == {KEEP}


@pytest.mark.parametrize("mode", ["pipedream", "gpipe"])
@pytest.mark.parametrize("chooses", [(), (SWAP, RECOMPUTE)], ids=["fixed", "chooses"])
def test_times_of_searching_and_simulating_are_within_the_total(
    mode: str, chooses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on by a second whenever it is read."""
    seconds = itertools.count(1000)
    made = Planner(replace(request(None), chooses=chooses), mode)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    made.best()
    assert min(made.search_s, made.predict_s) >= 1
    assert made.search_s + made.predict_s < next(seconds) - 1000
