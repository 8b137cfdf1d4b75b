"""Sharded optimizer state and recomputation as choices of the planner where memory binds."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.planner.choices import open_rows
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.flat import SearchStage
from pipebench.planner.floor import Floors
from pipebench.planner.placement_costs import Sketch
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import MODES
from pipebench.schedule.syncs import NOT_SHARDED, OPTIMIZER
from tests.oracles import pipelining
from tests.oracles.pipelining import WAYS, Layer, Way

UPDATE_S, STATE, SENT = 1e-4, 2, 8  # per byte of parameters; bytes at every cut
NEITHER = Way(shards=False, recomputes=False)


def request_of(layers: list[Layer], workers: int, limit: int | None, mode: str = "pipedream") -> Request:
    rows = [
        LayerProfile(
            f"l{i}", "Linear", forward, backward, SENT, SENT, (i - 1,) if i else (), () if i else ("x",),
            {f"l{i}.w": weights}, {}, saved_bytes=saved,
        )
        for i, (forward, backward, weights, saved) in enumerate(layers)
    ]  # fmt: skip
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 4, 4, (len(rows) - 1,))
    profile = Profile("t", "unit", "file", "", {4: (*rows, loss)}, UPDATE_S, 0.0, {4: 0.0}, {}, STATE)
    cluster = Cluster("flat", "unit", limit, (Level("server", workers, 1e12, 0.0),))
    given = Request(profile=profile, cluster=cluster, model=COST_MODELS["overlap"], minibatch_size=4)
    return replace(given, may_shard=(mode,), may_recompute=True)


def drawn(seed: int) -> tuple[list[Layer], int, int]:
    """Return random layers, a number of workers, and a memory limit in which few plans fit."""
    numbers = random.Random(seed)
    layers = [
        (numbers.uniform(0.5, 2), numbers.uniform(1, 4), 4 * numbers.randint(1, 2000), 4 * numbers.randint(1, 2000))
        for _ in range(numbers.randint(3, 4))
    ]
    whole = sum(4 * weights + saved for _, _, weights, saved in layers)
    return layers, numbers.randint(2, 4), int(numbers.uniform(0.25, 1.0) * whole)


def way_of(found: PlanEstimate) -> Way:
    again = {policy for stage in found.plan.stages for policy in stage.memory}
    return Way(found.plan.shard == OPTIMIZER, again == {"recompute"})


def fastest(layers: list[Layer], workers: int, limit: float) -> dict[Way, float]:
    """Return the seconds per minibatch of the fastest plan of every way, by brute force; infinite if none fits.

    More in flight than NOAM has to be 2 % faster.
    """
    best = {(way, spare): math.inf for way in WAYS for spare in (0, 1)}
    for plan, (way, spare) in itertools.product(pipelining.every_plan(len(layers), workers), best):
        if pipelining.num_bytes(layers, plan, way, spare, state=STATE, sent=SENT) <= limit:
            made_s = pipelining.minibatch_s(layers, plan, way, spare, UPDATE_S)
            best[way, spare] = min(best[way, spare], made_s)
    return {way: best[way, best[way, 1] < 0.98 * best[way, 0]] for way in WAYS}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [0, 2, 3, 4, 7, 9, 10, 17, 19, 26])
def test_the_choice_equals_brute_force_s(seed: int) -> None:
    """Over all plans and ways, with time and memory by hand."""
    layers, workers, limit = drawn(seed)
    best, free_s = fastest(layers, workers, limit), fastest(layers, workers, math.inf)[NEITHER]
    found = Planner(request_of(layers, workers, limit), "pipedream").best()
    if best[NEITHER] <= free_s:
        assert not found.choices
        best = {NEITHER: best[NEITHER]}
    else:
        assert len(found.choices) == len(WAYS)
        predicted = {Way(each.shard == OPTIMIZER, each.recompute): each.minibatch_s for each in found.choices}
        for way in (each for each in WAYS if best[each] < math.inf):  # else at most at a depth below NOAM
            assert predicted[way] == pytest.approx(best[way], rel=1e-6)
    spare = found.plan.depth - found.plan.noam
    stages = [(stage.start, stage.stop, stage.replicas) for stage in found.plan.stages]
    assert found.minibatch_s == pytest.approx(min(best.values()), rel=1e-6)
    assert found.minibatch_s == pytest.approx(
        pipelining.minibatch_s(layers, stages, way_of(found), spare, UPDATE_S), rel=1e-6
    )
    assert pipelining.num_bytes(layers, stages, way_of(found), spare, state=STATE, sent=SENT) <= limit


LAYERS = [(1.0, 2.0, 16_000, 8000), (1.0, 2.0, 4000, 8000), (1.0, 2.0, 4000, 8000), (1.0, 2.0, 16_000, 8000)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("limit", [110_000, 90_000, 80_000])
@pytest.mark.parametrize("mode", ["pipedream", "hybrid", "pipedream-2bw", "pipedream-flush", "interleaved"])
def test_a_choice_is_planned_as_if_the_recipe_had_it(mode: str, limit: int) -> None:
    open_request = request_of(LAYERS, 4, limit, mode)
    written = {}
    for way in WAYS:
        row = replace(MODES[mode], shard=OPTIMIZER if way.shards else NOT_SHARDED, recompute=way.recomputes)
        try:
            written[way] = Planner(replace(open_request, row=row, may_shard=(), may_recompute=False), mode).best()
        except PlanError:
            continue
    if not written:
        with pytest.raises(PlanError, match="fits"):
            Planner(open_request, mode).best()
        return
    found = Planner(open_request, mode).best()
    if found.choices:
        assert found.minibatch_s == min(each.minibatch_s for each in written.values())
        assert {each.minibatch_s for each in found.choices} - {None} == {each.minibatch_s for each in written.values()}
    same = written[way_of(found)]
    assert replace(found.plan, shard=None) == same.plan
    assert found.num_bytes == same.num_bytes


def test_the_faster_of_shards_and_recomputation_is_chosen() -> None:
    chosen = [Planner(request_of(LAYERS, 4, limit), "pipedream").best() for limit in (120_000, 100_000)]
    assert [way_of(each) for each in chosen] == [Way(shards=True, recomputes=False), Way(shards=True, recomputes=True)]
    heavy = [(1.0, 2.0, 400, 16_000)] * 4
    assert way_of(Planner(request_of(heavy, 4, 30_000), "pipedream").best()) == Way(shards=False, recomputes=True)


def test_nothing_is_chosen_unless_memory_binds_and_the_recipe_leaves_it_open() -> None:
    bound = request_of(LAYERS, 4, 120_000)
    assert Planner(bound, "pipedream").best().choices
    cluster = replace(bound.cluster, memory_bytes=None)
    for given in (
        replace(bound, cluster=cluster),
        replace(bound, cluster=replace(cluster, memory_bytes=10**9)),
        replace(bound, may_shard=(), may_recompute=False),
        replace(bound, model=COST_MODELS["sosp19"]),
    ):
        found = Planner(given, "pipedream").best()
        assert not found.choices
        assert way_of(found) == NEITHER
    straight = Planner(request_of(LAYERS, 4, 50_000, "model"), "model")
    assert [*open_rows(straight)] == [replace(MODES["model"], recompute=True)]


def test_no_plan_with_shards_is_faster_than_its_lower_bound() -> None:
    """Which counts the update of a shard, not of the whole stage: the climb rules plans out by it."""
    given = replace(request_of(LAYERS, 4, None), row=replace(MODES["pipedream"], shard=OPTIMIZER))
    planner = Planner(given, "pipedream")
    found = planner.for_replicas([4])
    floor_s = Floors(planner).floor_s(Sketch((SearchStage(0, 4, 4),), ((0, 1, 2, 3),), 1))
    assert 0.99 * found.minibatch_s <= floor_s <= (1 + 1e-6) * found.minibatch_s
