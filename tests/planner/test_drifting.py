"""Replicas that don't wait for each other push at once at first, and drift apart; predictions wait for that."""

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.profile.model import LayerProfile, Profile
from pipebench.simulate.steady import simulate_all

MB = 1_000_000


def test_the_prediction_of_asynchronous_replicas_is_that_of_a_long_run() -> None:
    """Five of six workers push to the sixth, and pull: in step that takes 1 s for six minibatches, else 0.5 s."""
    rows = (
        LayerProfile("layer", "Linear", 1e-3, 2e-3, 100, 100, (), ("x",), {"w": 10 * MB}),
        LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, (0,)),
    )
    profile = Profile("one layer", "unit", "file", "unit", {8: rows}, 1e-10, 0.0, {8: 0.0}, {})
    cluster = Cluster("made", "unit", None, (Level("server", 6, 1e8, 0.0),))
    planner = Planner(Request(profile, cluster, COST_MODELS["overlap"], 8), "dp-asp")
    found = planner.best()
    workload, _ = planner.workload(found)
    half, whole = (simulate_all(workload, count).end_s for count in (600, 1200))
    assert found.minibatch_s == pytest.approx((whole - half) / 600, rel=0.1)
    assert 6 / (5 * 10 * MB / 1e8) > 1 / found.minibatch_s > 9.0
