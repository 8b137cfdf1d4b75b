"""Round trips: on plans with simple ones, the bound of minibatches in flight equals the simulator's time."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.flat import SearchStage
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.profile.model import LayerProfile, Profile


def predicted(
    layers: Sequence[tuple[float, int]], replicas: Sequence[int], weights: int = 0, **limits: Any
) -> PlanEstimate:
    """Return a plan with one layer per stage, given as seconds (a third forward) and output bytes; links of 1 GB/s."""
    rows = [
        LayerProfile(
            *(f"layer{i}", "Linear", seconds / 3, 2 * seconds / 3, size, size),
            reads=(i - 1,) if i else (),
            parameter_sizes={f"w{i}": weights} if weights else {},
        )
        for i, (seconds, size) in enumerate(layers)
    ]
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, reads=(len(rows) - 1,))
    profile = Profile("chain", "unit", "file", "", {1: (*rows, loss)}, 0.0, 0.0, {}, {})
    cluster = Cluster("flat", "unit", None, (Level("server", sum(replicas), 1e9, 0.0, **limits),))
    planner = Planner(Request(profile, cluster, COST_MODELS["overlap"], 1), "pipedream")
    bounds = pairwise(range(len(layers) + 1))
    plan = planner.estimate("", [SearchStage(a, b, m) for (a, b), m in zip(bounds, replicas, strict=True)])
    return planner.with_prediction(plan)


def test_without_transfers_equal_stages_are_never_idle() -> None:
    plan = predicted([(6.0, 1)] * 4, (1, 1, 1, 1))
    assert plan.bottleneck_s == pytest.approx(6.0) == pytest.approx(plan.minibatch_s)


def test_a_faster_neighbour_hides_transfers() -> None:
    """Two stages, two minibatches in flight: 6 + 3 + 2 * 1 for two of them is less than 6 each."""
    plan = predicted([(6.0, 10**9), (3.0, 0)], (1, 1))
    assert plan.bottleneck_s == pytest.approx(6.0) == pytest.approx(plan.minibatch_s)


def test_between_equal_stages_half_the_round_trip_is_lost() -> None:
    plan = predicted([(6.0, 10**9), (6.0, 0)], (1, 1))
    assert plan.bottleneck_s == pytest.approx((6 + 6 + 2) / 2) == pytest.approx(plan.minibatch_s)


def test_replicas_of_a_round_pass_a_narrower_stage_one_after_the_other() -> None:
    """2-1-1 of equal stages, whose gradients are summed: two minibatches in 12 + 6 seconds."""
    plan = predicted([(12.0, 1), (6.0, 1), (6.0, 0)], (2, 1, 1), weights=4)
    assert plan.bottleneck_s == pytest.approx(9.0) == pytest.approx(plan.minibatch_s)


def test_a_connection_that_gets_less_than_its_port_sets_the_pace() -> None:
    """4e9 bytes each way at 0.25 GB/s take 16 s, however fast the stages; there and back 33 s for two in flight."""
    plan = predicted([(1.0, 4 * 10**9), (1.0, 0)], (1, 1), p2p_bytes_per_s=0.25e9)
    assert plan.bottleneck_s == pytest.approx((1 + 1 + 32) / 2) == pytest.approx(plan.minibatch_s)
    wide = predicted([(4.0, 4 * 10**9), (1.0, 0)], (4, 1), p2p_bytes_per_s=0.25e9)
    assert wide.bottleneck_s == pytest.approx((4 + 1 + 32) / 8)  # and 16 / 4 per connection
    assert wide.bottleneck_s <= wide.minibatch_s < 16


def test_copies_to_and_from_hosts_occupy_the_stages() -> None:
    """6 s of computing, and 2 and 2 s of copies at either end: ten seconds of work for each of the two stages."""
    plan = predicted([(6.0, 10**9), (6.0, 0)], (1, 1), host_copy_bytes_per_s=0.5e9)
    both_ways = 2 + 4 * 2
    assert plan.bottleneck_s == pytest.approx((6 + 6 + both_ways) / 2) == pytest.approx(plan.minibatch_s)
    plan = predicted([(16.0, 10**9), (6.0, 0)], (1, 1), host_copy_bytes_per_s=0.5e9)
    assert plan.bottleneck_s == pytest.approx(16 + 4) == pytest.approx(plan.minibatch_s)


def test_a_ring_that_gets_less_than_its_port_outlasts_the_backward() -> None:
    """3 s of backward and 1 s of forward beside a ring of 4e9 bytes, 3/2 of them at 0.5 GB/s: 12 s."""
    alone = predicted([(4.0, 0)], (4,), weights=4 * 10**9, ring_bytes_per_s=0.5e9)
    assert alone.minibatch_s == pytest.approx((4 + 12) / 4)
    assert alone.bottleneck_s <= alone.minibatch_s
    assert alone.bottleneck_s >= (1 + 12) / 4
