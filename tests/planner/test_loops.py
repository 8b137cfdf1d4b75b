"""What minibatches in flight allow: on plans whose loops are easy to follow, the bound is what the simulator does."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.flat import SearchStage
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.profile.model import LayerProfile, Profile


def predicted(layers: Sequence[tuple[float, int]], replicas: Sequence[int], weights: int = 0) -> PlanEstimate:
    """Return a plan with one layer per stage, given as seconds (a third forward) and output bytes; 1 byte/s links."""
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
    cluster = Cluster("flat", "unit", None, (Level("server", sum(replicas), 1e9, 0.0),))
    planner = Planner(Request(profile, cluster, COST_MODELS["overlap"], 1), "pipedream")
    bounds = pairwise(range(len(layers) + 1))
    plan = planner.estimate("", [SearchStage(a, b, m) for (a, b), m in zip(bounds, replicas, strict=True)])
    return planner.with_prediction(plan)


def test_without_transfers_equal_stages_keep_each_other_busy() -> None:
    plan = predicted([(6.0, 1)] * 4, (1, 1, 1, 1))
    assert plan.bottleneck_s == pytest.approx(6.0) == pytest.approx(plan.minibatch_s)


def test_a_faster_neighbour_hides_transfers() -> None:
    """Two stages, two minibatches in flight: 6 + 3 + 2 * 1 for two of them is less than 6 each."""
    plan = predicted([(6.0, 10**9), (3.0, 0)], (1, 1))
    assert plan.bottleneck_s == pytest.approx(6.0) == pytest.approx(plan.minibatch_s)


def test_between_equal_stages_half_the_way_there_and_back_is_lost() -> None:
    plan = predicted([(6.0, 10**9), (6.0, 0)], (1, 1))
    assert plan.bottleneck_s == pytest.approx((6 + 6 + 2) / 2) == pytest.approx(plan.minibatch_s)


def test_replicas_of_a_round_pass_a_narrower_stage_one_after_the_other() -> None:
    """2-1-1 of equal stages, whose gradients are summed: two minibatches in 12 + 6 seconds."""
    plan = predicted([(12.0, 1), (6.0, 1), (6.0, 0)], (2, 1, 1), weights=4)
    assert plan.bottleneck_s == pytest.approx(9.0) == pytest.approx(plan.minibatch_s)
