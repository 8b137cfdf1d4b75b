"""The error if no plan fits: it says by how much, and only advice that helps."""

from dataclasses import replace

import pytest

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.planner.compare import compare
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import MODES
from tests.bench.planning import chain, flat


def request(parameter_bytes: int, saved_bytes: int, limit_bytes: int | None, num_layers: int = 4) -> Request:
    """Return a request for four equal layers, a minibatch of 8 and two workers."""
    made = [
        LayerProfile(
            *(f"layer{i}", "Linear", 1e-3, 2e-3, 100, 100, (i - 1,) if i else ()),
            parameter_sizes={f"weight{i}": parameter_bytes},
            saved_bytes=saved_bytes,
        )
        for i in range(num_layers)
    ]
    rows = (*made, LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, (num_layers - 1,)))
    profile = Profile("drawn", "drawn", "file", "drawn", {8: rows}, 0.0, 0.0, {8: 0.0}, {})
    return Request(profile, Cluster("drawn", "drawn", limit_bytes, flat(2)), COST_MODELS["overlap"], 8)


@pytest.mark.parametrize("mode", ["pipedream", "dp", "gpipe"])
def test_smaller_minibatches_are_advised_where_they_can_help(mode: str) -> None:
    """Once they were advised even if a worker's weights and gradients alone are too large."""
    with pytest.raises(PlanError, match=r"what would help: .*a minibatch smaller than 8"):
        Planner(request(10, 10_000, 2_000), mode).best()
    with pytest.raises(PlanError) as caught:
        Planner(request(10_000, 10, 2_000), mode).best()
    assert "smaller" not in str(caught.value)
    assert "(weights, gradients and optimizer state alone " in str(caught.value)
    assert str(caught.value).endswith("devices with more memory, or fewer parameters")


def test_several_stages_per_worker_need_that_many_places_to_cut() -> None:
    """The error once named infinitely many bytes beyond the 0 B of a device."""
    assert Planner(request(10, 10, None), "interleaved").best().plan.chunks == 2
    with pytest.raises(PlanError) as caught:
        Planner(request(10, 10, None, num_layers=3), "interleaved").best()
    assert str(caught.value) == (
        "no plan of mode interleaved: 2 stages on each of at least 2 workers are needed; there are 2, and the model "
        "can be cut into 3 stages at most"
    )
    closed = request(10, 10, 10**6, num_layers=3)
    with pytest.raises(PlanError, match=r"3 stages at most$"):  # what is done for memory would be no help
        Planner(replace(closed, may_recompute=True), "interleaved").best()


def test_a_model_that_takes_no_time_has_a_plan() -> None:
    """The local search divided its gain by the best plan's time: 0 by 0."""
    profile = chain(6, 0)
    rows = tuple(replace(row, forward_s=0.0, backward_s=0.0) for row in profile.layers[1])
    idle = replace(profile, layers={1: rows})
    asked = Request(idle, Cluster("drawn", "drawn", None, flat(4)), COST_MODELS["overlap"], 1)
    assert Planner(asked, "pipedream").best().minibatch_s == 0


def test_data_parallelism_is_compared_though_it_does_not_fit() -> None:
    """It was the mode asked for without a limit on memory, where that had columns of its own."""
    asked = request(1000, 10, 6000)
    found = compare(replace(asked, row=replace(MODES["gpipe"], recompute=True)), "gpipe", others=False)
    assert "dp" in found.refused
    assert (found.dp.plan.mode, found.dp.plan.replicas, len(found.dp.plan.stages)) == ("dp", (2,), 1)


def test_the_mode_nearest_to_fitting_is_named() -> None:
    """It was PipeDream's reason. Of one layer with Adam's state ZeRO-1 halves 16 kB of 32 kB, and keeps 10 B beside."""
    asked = request(8000, 10, 20_000, num_layers=1)
    with_state = replace(asked, profile=replace(asked.profile, state_bytes_per_byte=2))
    with pytest.raises(PlanError) as caught:
        compare(with_state, None)
    assert str(caught.value).startswith(
        f"none of {len(MODES)} modes has a plan; the nearest is zero1: no plan of mode zero1 fits: the leanest needs "
        "24.0 kB on a worker (weights, gradients and optimizer state alone 24.0 kB), 4.01 kB more than the 20.0 kB"
    )
