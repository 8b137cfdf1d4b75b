"""The extrapolated epoch equals the fully simulated one."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.garbage import without_collector
from pipebench.model.sampling import Size
from pipebench.simulate import sharing, steady
from pipebench.simulate.costs import StageCosts
from pipebench.simulate.meter import Meter
from pipebench.simulate.sharing import Flow, fair_rates
from pipebench.simulate.steady import NOTHING, simulate_all, simulate_segment
from tests.support import Blobs, Mlp, make_setup

PLANS = [([], [1]), ([2], [1, 1]), ([2, 4, 6], [1] * 4), ([4], [2, 1]), ([4], [3, 1]), ([2, 4], [1, 2, 1]), ([], [3])]
COLUMNS: list[dict[str, Any]] = [
    {"weights": "stash"},
    {"weights": "stash", "depth": 7},
    {"weights": "one", "microbatches": 6, "depth": 7},
    {"weights": "one", "microbatches": 2, "order": "all-forwards"},
    {"weights": "one", "microbatches": 2},
    {"weights": "one", "depth": 1},
    {"weights": "one", "microbatches": 2, "clip_norm": 1.0},
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("columns", COLUMNS, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_extrapolation_is_exact(plan: tuple[list[int], list[int]], columns: dict[str, Any]) -> None:
    setup = make_setup(Mlp(), plan, dataset=Blobs(num_train=40 * 12 + 3, num_eval=4), **columns)
    num_minibatches = setup.sampler.minibatches_per_epoch
    meters = [Meter(setup.pipeline), Meter(setup.pipeline)]
    whole, short = simulate_all(setup, num_minibatches, meters[0]), simulate_segment(setup, num_minibatches, meters[1])
    spans = [len(meter.timeline().spans) for meter in meters]
    assert spans[1] < 0.6 * spans[0], "nothing was extrapolated, so this would test nothing"
    assert short.end_s == pytest.approx(whole.end_s, rel=1e-9)
    assert short.busy_s == pytest.approx(whole.busy_s, rel=1e-9)
    assert short.stall_s == pytest.approx(whole.stall_s, rel=1e-6, abs=1e-6)
    assert short.num_bytes == whole.num_bytes


@pytest.mark.parametrize("plan", [PLANS[2], PLANS[4]], ids=str)
def test_a_longer_segment_equals_an_extrapolated_one_to_the_bit(plan: tuple[list[int], list[int]]) -> None:
    setup = make_setup(Mlp(), plan, dataset=Blobs(num_train=40 * 12 + 3, num_eval=4), weights="stash")
    known = {count: longer for count in range(1, 60) if (longer := simulate_segment(setup, count).longer(count))}
    assert known
    assert all(longer == simulate_segment(setup, 2 * count) for count, longer in known.items())
    added = [simulate_segment(setup, count).extended(NOTHING, 1) for count in known]
    assert all(each.longer(count) is None for count, each in zip(known, added, strict=True))  # not of periods


@pytest.mark.parametrize("first", [-1, 0], ids=["alike", "drawn"])
def test_microbatches_of_different_sizes_take_different_times(first: int) -> None:
    setup = make_setup(Mlp(), ([], [1]), dataset=Blobs(num_train=40, num_eval=4), weights="one", microbatches=3)
    sizes = setup.sampler.sizes(0, 3)
    assert sorted(sizes) == [1, 1, 2]
    forward_s: dict[Size, float] = {1: 1.0, 2: 1.5}
    backward_s: dict[Size, float] = {1: 2.0, 2: 2.5}
    costs = replace(setup.costs.stages[0], forward_s=forward_s, backward_s=backward_s, update_s=0.25)
    setup = replace(setup, costs=replace(setup.costs, stages=(costs,)))
    assert simulate_all(setup, 10, first=first).busy_s == pytest.approx(10 * (3.0 + 3.0 + 4.0 + 0.25))


@pytest.mark.usefixtures("few_objects_to_collect")
def test_ended_events_are_freed_without_the_garbage_collector() -> None:
    """A message and what was to happen when it arrived held each other; searching took half the time of 4,096 workers.

    Nothing searches while a segment is simulated; what is left of one is as much however long it was.
    """
    setup = make_setup(Mlp(), ([2, 4], [1, 2, 1]), weights="one", microbatches=2, dataset=Blobs(40 * 12, 4))
    left = []
    for num_minibatches in (4, 100):
        simulate_all(setup, num_minibatches)
        assert gc.isenabled()
        gc.collect()
        with without_collector():  # nor right after the simulation, which would leave nothing to count
            simulate_all(setup, num_minibatches)
            left.append(gc.collect())
    assert max(left) < min(left) + 20


@pytest.mark.parametrize("patience", [48, 51])  # 17 blocks of three have no whole halves
@pytest.mark.parametrize("plan", [([2, 4, 6], [1] * 4), ([4], [3, 1])], ids=str)
def test_without_a_repeated_state_the_later_half_is_extrapolated(
    plan: tuple[list[int], list[int]], patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No period is tried here, as if none were there."""
    monkeypatch.setattr(steady, "_BLOCKS", ())
    monkeypatch.setattr(steady, "_PATIENCE", patience)
    setup = make_setup(Mlp(), plan, dataset=Blobs(num_train=400 * 12 + 3, num_eval=4))
    num_minibatches = setup.sampler.minibatches_per_epoch
    whole, mean = simulate_all(setup, num_minibatches), simulate_segment(setup, num_minibatches)
    assert patience <= mean.num_simulated < num_minibatches / 2
    assert mean.end_s == pytest.approx(whole.end_s, rel=1e-3)
    assert abs(mean.end_s - whole.end_s) <= 3 * mean.error_s + 1e-9 * whole.end_s
    assert mean.num_bytes == whole.num_bytes


@pytest.mark.parametrize("plan", [([], [3]), ([2], [2, 1]), ([4], [3, 1])], ids=str)
def test_blocks_of_more_minibatches_than_patience_reaches_are_waited_for(
    plan: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on thousands of replicas, where the first block alone is longer: there are no halves of it, nor parts."""
    monkeypatch.setattr(steady, "_PATIENCE", 2)
    setup = make_setup(Mlp(), plan, dataset=Blobs(num_train=40 * 12 + 3, num_eval=4))
    num_minibatches = setup.sampler.minibatches_per_epoch
    whole, short = simulate_all(setup, num_minibatches), simulate_segment(setup, num_minibatches)
    assert short.end_s == pytest.approx(whole.end_s, rel=1e-9)
    assert short.error_s == 0.0, "a period is found before a mean has to do"


@pytest.mark.parametrize("plan", [([2], [1, 3]), ([4], [3, 1]), ([2], [2, 2])], ids=str)
def test_extrapolation_is_exact_where_links_are_shared(
    plan: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow links between servers of two: transfers meet there, at rates that change while they are on their way."""
    met: list[int] = []

    def counted(flows: Sequence[Flow]) -> list[float]:
        met.append(len(flows))
        return fair_rates(flows)

    monkeypatch.setattr(sharing, "fair_rates", counted)
    cluster = Cluster("slow", "unit", None, (Level("server", 2, 400.0, 1e-3), Level("cluster", 2, 70.0, 1e-2)))
    setup = make_setup(Mlp(), plan, dataset=Blobs(num_train=40 * 12 + 3, num_eval=4), cluster=cluster)
    num_minibatches = setup.sampler.minibatches_per_epoch
    short = simulate_segment(setup, num_minibatches)
    extrapolated = len(met)
    assert max(met) > 1, "nobody met anybody"
    whole = simulate_all(setup, num_minibatches)
    assert extrapolated < 0.6 * (len(met) - extrapolated), "nothing was extrapolated, so this would test nothing"
    assert short.end_s == pytest.approx(whole.end_s, rel=1e-9)
    assert short.busy_s == pytest.approx(whole.busy_s, rel=1e-9)
    assert short.stall_s == pytest.approx(whole.stall_s, rel=1e-6)
    assert short.num_bytes == whole.num_bytes


def test_a_segment_too_short_to_be_steady_is_simulated_whole() -> None:
    setup = make_setup(Mlp(), ([2, 4, 6], [1] * 4), dataset=Blobs(num_train=20, num_eval=4))
    assert simulate_segment(setup, 5) == simulate_all(setup, 5)


def test_stages_at_different_rates_are_not_steady() -> None:
    """Beyond NOAM a faster stage works off its queue, each backward as long as the one before, and then waits."""
    setup = make_setup(Mlp(), ([2, 4], [1, 1, 1]), dataset=Blobs(num_train=200 * 4, num_eval=4), depth=7)
    stages = [_times(forward_s, costs) for forward_s, costs in zip((3.0, 2.9, 2.9), setup.costs.stages, strict=True)]
    setup = replace(setup, costs=replace(setup.costs, stages=tuple(stages)))
    whole, short = simulate_all(setup, 200), simulate_segment(setup, 200)
    assert short.end_s == pytest.approx(whole.end_s, rel=1e-9)


def test_workers_at_different_rates_are_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for each other, the worker that hosts the server is ahead of those across a slow link."""
    monkeypatch.setattr(steady, "_PATIENCE", 48)
    cluster = Cluster("slow", "unit", None, (Level("server", 2, 400.0, 1e-3), Level("cluster", 2, 20.0, 1e-2)))
    columns: dict[str, Any] = {"weights": "newest-pulled", "sync": "asynchronous", "depth": 1}
    setup = make_setup(Mlp(), ([], [4]), dataset=Blobs(num_train=400 * 12, num_eval=4), cluster=cluster, **columns)
    num_minibatches = setup.sampler.minibatches_per_epoch
    whole, short = simulate_all(setup, num_minibatches), simulate_segment(setup, num_minibatches)
    assert short.end_s == pytest.approx(whole.end_s, rel=1e-9)
    assert short.num_bytes == whole.num_bytes


def _times(forward_s: float, costs: StageCosts) -> StageCosts:
    sizes = [*costs.forward_s]
    return replace(costs, forward_s=dict.fromkeys(sizes, forward_s), backward_s=dict.fromkeys(sizes, 1.5 * forward_s))
