"""How many stages: modes of equally wide stages try every number, since bottlenecks don't say which is best."""

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


def asked(mode: str, num_workers: int = 8, memory_bytes: int | None = None) -> Request:
    """Return a request for eight whole minibatches per flush."""
    made = request(UNEVEN, num_workers, memory_bytes=memory_bytes, weights=1000)
    return replace(made, microbatches=1, accumulate=8, row=MODES[mode])


@pytest.mark.parametrize("mode", ["pipedream-flush", "zero-bubble", "interleaved", "pipedream-2bw"])
def test_no_plan_of_another_length_that_the_cost_model_cuts_is_faster(mode: str) -> None:
    of = Planner(replace(asked(mode), cluster=SLOW), mode)
    widths = [1] if MODES[mode].shape == "any" else [1, 2, 4]
    best, others = of.best(), []
    for width in widths:
        for positions in range(2, min(8 // width, len(UNEVEN) // MODES[mode].chunks) + 1):
            others.append(of.for_replicas([width] * positions))
    in_order = [each.minibatch_s for each in others if each.plan.devices == tuple(range(len(each.plan.devices)))]
    assert len(in_order) > 3
    assert best.minibatch_s <= min(in_order) * (1 + 1e-9)


def test_more_devices_of_the_same_memory_are_no_slower() -> None:
    """Zero bubble's first stage has as many units in flight as there are stages, whose number is a choice."""
    mode = "zero-bubble"
    alone = Planner(asked(mode), mode).for_replicas([1]).memory_bytes
    for limit in (1.05, 1.3, 2.0):
        best_s = [_best_s(mode, num_workers, int(limit * alone)) for num_workers in (1, 2, 3, 4, 6, 8)]
        assert best_s == sorted(best_s, reverse=True)
        assert best_s[0] < math.inf


def _best_s(mode: str, num_workers: int, memory_bytes: int) -> float:
    try:
        best = Planner(asked(mode, num_workers, memory_bytes), mode).best()
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
