"""The number of stages: modes with equally wide stages try every number, since bottlenecks don't decide it."""

import math
from dataclasses import replace

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.schedule.modes import MODES
from tests.planner.test_rounds import BACKWARD_S, FORWARD_S, NUM_LAYERS, RATE, STEP_S_PER_BYTE, WEIGHTS
from tests.planner.test_rounds import request as same_layers
from tests.planner.test_shapes import request

UNEVEN = [0.03, 0.05, 0.02, 0.06, 0.04, 0.03, 0.05, 0.02, 0.06, 0.04]
SLOW = Cluster("slow", "unit", None, (Level("server", 4, 1e9, 1e-6), Level("cluster", 2, 2e7, 1e-5)))


def request_of(mode: str, num_workers: int = 8, memory_bytes: int | None = None) -> Request:
    """Return a request for eight whole minibatches per flush."""
    made = request(UNEVEN, num_workers, memory_bytes=memory_bytes, weights=1000)
    return replace(made, microbatches=1, accumulate=8, row=MODES[mode])


@pytest.mark.parametrize("mode", ["pipedream-flush", "zero-bubble", "interleaved", "pipedream-2bw"])
def test_no_plan_of_another_length_that_the_cost_model_cuts_is_faster(mode: str) -> None:
    of = Planner(replace(request_of(mode), cluster=SLOW), mode)
    widths = [1] if MODES[mode].shape == "any" else [1, 2, 4]
    best, others = of.best(), []
    for width in widths:
        for positions in range(2, min(8 // width, len(UNEVEN) // MODES[mode].chunks) + 1):
            others.append(of.for_replicas([width] * positions))
    in_order = [each.minibatch_s for each in others if each.plan.devices == tuple(range(len(each.plan.devices)))]
    assert len(in_order) > 3
    assert best.minibatch_s <= min(in_order) * (1 + 1e-9)


DISTANT = Cluster("distant", "unit", None, (Level("server", 2, 1e9, 2e-3),))  # a round trip takes as long as two layers


@pytest.mark.parametrize("mode", ["gpipe", "pipedream-flush"])
def test_a_pipeline_that_flushes_is_cut_without_the_round_trips_that_it_hides(mode: str) -> None:
    """Eight equal layers on two devices were cut 5 to 3: a round trip counted as the later stage's time."""
    request_of = replace(request([1e-3] * 8, 2), cluster=DISTANT, microbatches=1, accumulate=4, row=MODES[mode])
    of = Planner(request_of, mode)
    times = {cut: of.for_replicas([1, 1], [cut]).minibatch_s for cut in range(1, 8)}
    assert min(times, key=times.__getitem__) == 4
    for found in (of.best(), of.for_replicas([1, 1])):
        assert found.plan.starts == (4,)
        assert found.minibatch_s == times[4]


def test_cuts_for_a_flush_are_taken_only_where_they_fit() -> None:
    """The faster cut puts all four layers that keep ten times as much into one stage."""
    made = request([1e-3] * 8, 2)
    rows = tuple(
        replace(row, saved_bytes=row.saved_bytes * (10 if 4 <= index < 8 else 1))
        for index, row in enumerate(made.profile.layers[8])
    )
    kept = replace(made, profile=replace(made.profile, layers={8: rows}), cluster=DISTANT, microbatches=1, accumulate=4)
    request_of = replace(kept, row=MODES["gpipe"])
    faster, slower = (Planner(request_of, "gpipe").for_replicas([1, 1], [cut]) for cut in (4, 5))
    assert faster.memory_bytes > slower.memory_bytes
    for limit_bytes, start in ((faster.memory_bytes, 4), (slower.memory_bytes, 5)):
        limited = replace(request_of, cluster=replace(DISTANT, memory_bytes=int(limit_bytes)))
        assert Planner(limited, "gpipe").for_replicas([1, 1]).plan.starts == (start,)


def test_more_devices_of_the_same_memory_are_no_slower_in_zero_bubble() -> None:
    """Zero bubble's first stage has as many units in flight as there are stages, whose number is a choice."""
    mode = "zero-bubble"
    alone = Planner(request_of(mode), mode).for_replicas([1]).memory_bytes
    for limit in (1.05, 1.3, 2.0):
        best_s = [_best_s(mode, num_workers, int(limit * alone)) for num_workers in (1, 2, 3, 4, 6, 8)]
        assert best_s == sorted(best_s, reverse=True)
        assert best_s[0] < math.inf


def _best_s(mode: str, num_workers: int, memory_bytes: int) -> float:
    try:
        best = Planner(request_of(mode, num_workers, memory_bytes), mode).best()
    except PlanError:
        return math.inf
    assert best.memory_bytes <= memory_bytes
    return best.minibatch_s


@pytest.mark.parametrize("accumulate", [4, 16])
def test_a_plan_too_large_to_simulate_fills_and_drains_at_every_flush(accumulate: int) -> None:
    """Interleaved: the three later positions wait for half a minibatch each, of two stages per worker."""
    found = Planner(same_layers([512], "interleaved", accumulate=accumulate), "interleaved").for_replicas([128] * 4)
    assert not found.is_simulated
    step_s = 2 * STEP_S_PER_BYTE * WEIGHTS / accumulate
    pace_s = NUM_LAYERS / 4 * (FORWARD_S + BACKWARD_S) + step_s
    ring_s = 2 * 127 / 128 * 2 * WEIGHTS / RATE / accumulate
    expected_s = pace_s * (1 + 3 / 2 / accumulate) + ring_s
    assert found.minibatch_s == pytest.approx(expected_s / 128, rel=1e-3)
