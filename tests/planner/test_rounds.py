"""What an update's rounds share: its gradient sum and its step are once per update, not once per minibatch or unit."""

from collections.abc import Sequence

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import MODES

MB = 1_000_000
FORWARD_S, BACKWARD_S, NUM_LAYERS, WEIGHTS = 1e-3, 2e-3, 8, 20 * MB  # of each layer
RATE = 1e9


def request(counts: Sequence[int], mode: str, *, accumulate: int | None = None, microbatches: int = 1) -> Request:
    """Return a chain of equal layers that send little and have many weights; a microbatch takes as long as one."""
    rows = [
        LayerProfile(
            f"layer{i}", "Linear", FORWARD_S, BACKWARD_S, 100, 100, (i - 1,) if i else (), ("x",) if i == 0 else (),
            {f"w{i}": WEIGHTS}, saved_bytes=MB,
        )
        for i in range(NUM_LAYERS)
    ]  # fmt: skip
    rows.append(LayerProfile("loss", "loss", 0.0, 0.0, 8, 8, (NUM_LAYERS - 1,)))
    sizes = {8: tuple(rows), 8 // microbatches: tuple(rows)}
    profile = Profile("chain", "unit", "file", "chain", sizes, 1e-10, 0.0, dict.fromkeys(sizes, 0.0), {})
    cluster = Cluster("made", "unit", None, tuple(Level(str(i), n, RATE, 0.0) for i, n in enumerate(counts)))
    model, row = COST_MODELS["overlap"], MODES[mode]
    return Request(profile, cluster, model, 8, microbatches=microbatches, accumulate=accumulate, row=row)


@pytest.mark.parametrize("accumulate", [1, 3, 16])
def test_the_port_between_servers_carries_a_sum_once_per_update(accumulate: int) -> None:
    asked = request([2, 4], "pipedream-2bw", accumulate=accumulate)
    found = Planner(asked, "pipedream-2bw").for_replicas([8], [])
    # A ring of 8 sends 2 (8 - 1) / 8 of the weights over every link, per update of 8 `accumulate` minibatches.
    per_update_s = 2 * 7 / 8 * NUM_LAYERS * WEIGHTS / RATE
    assert found.port_s == pytest.approx(per_update_s / (8 * accumulate))
    assert found.bottleneck_s <= found.minibatch_s * (1 + 1e-9)
