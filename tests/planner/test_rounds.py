"""An update's gradient sum and its step are charged once per update, not once per minibatch or unit."""

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
RATE, STEP_S_PER_BYTE = 1e9, 1e-10


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
    profile = Profile("chain", "unit", "file", "chain", sizes, STEP_S_PER_BYTE, 0.0, dict.fromkeys(sizes, 0.0), {})
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


@pytest.mark.parametrize("counts", [(8,), (2, 4)])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_2bw_is_charged_per_update(counts: tuple[int, ...], width: int) -> None:
    """By default an update covers as many minibatches of each replica as are in flight: one per stage."""
    positions = 8 // width
    found = Planner(request(counts, "pipedream-2bw"), "pipedream-2bw").for_replicas([width] * positions)
    assert found.accumulate == positions
    own_bytes = NUM_LAYERS / positions * WEIGHTS
    ring_s = 2 * (width - 1) / width * own_bytes / RATE / positions
    assert [stage.sync_s for stage in found.stages] == pytest.approx([ring_s / width] * positions)
    compute_s = NUM_LAYERS / positions * (FORWARD_S + BACKWARD_S) + STEP_S_PER_BYTE * own_bytes / positions
    assert [stage.compute_s for stage in found.stages] == pytest.approx([compute_s / width] * positions)
    assert found.bottleneck_s <= found.minibatch_s * (1 + 1e-9)


def test_2bw_too_large_to_simulate_uses_all_workers_that_share_sums() -> None:
    """A layer per stage, on 1024 workers each, which sum in a ring behind every eighth backward."""
    best = Planner(request([8192], "pipedream-2bw"), "pipedream-2bw").best()
    assert not best.is_simulated
    assert best.plan.replicas == (1024,) * 8
    ring_s = 2 * 1023 / 1024 * WEIGHTS / RATE
    round_s = FORWARD_S + BACKWARD_S + (ring_s + STEP_S_PER_BYTE * WEIGHTS) / 8
    assert best.minibatch_s == pytest.approx(round_s / 1024)


@pytest.mark.parametrize(
    ("mode", "accumulate", "microbatches"),
    [
        ("pipedream-flush", 4, 1), ("gpipe", 1, 4), ("zero-bubble", 4, 1), ("interleaved", 2, 4), ("zbv", 8, 1),
        ("xpipe", None, 4), ("model", 4, 1), ("hybrid", 4, 1),
    ],
)  # fmt: skip
def test_a_step_is_shared_among_the_units_of_its_update(mode: str, accumulate: int | None, microbatches: int) -> None:
    found = Planner(request([2], mode, accumulate=accumulate, microbatches=microbatches), mode).for_replicas([1, 1])
    units_s = microbatches * (FORWARD_S * (1 + MODES[mode].recompute) + BACKWARD_S)
    passes = 3 if mode == "xpipe" else 1  # over the weights, of which two predict
    per_layer_s = units_s + passes * STEP_S_PER_BYTE * WEIGHTS / (accumulate or 1)
    assert [sum(each.compute_s for each in own) for own in found.by_position] == pytest.approx([4 * per_layer_s] * 2)
    assert found.bottleneck_s <= found.minibatch_s * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["spectrain", "pipemare", "xpipe"])
def test_without_staleness_no_weights_are_predicted(mode: str) -> None:
    """One stage has no staleness: a step is one pass over the weights, and there is one set of them, as in BSP."""
    found, bsp = (Planner(request([2], each), each).for_replicas([2]) for each in (mode, "dp"))
    assert (found.stages, found.bottleneck_s) == (bsp.stages, bsp.bottleneck_s)
    assert found.minibatch_s == pytest.approx(bsp.minibatch_s)
    planner = Planner(request([2], mode), mode)
    two = planner.for_replicas([1, 1])  # only the first stage is late
    copies, minibatch = (2 if mode == "pipemare" else 1), NUM_LAYERS // 2 * MB
    assert two.stages[0].memory_bytes - two.stages[1].memory_bytes == copies * NUM_LAYERS // 2 * WEIGHTS + minibatch
    first, last = planner.workload(two)[0].costs.stages
    assert first.update_s == pytest.approx(3 * last.update_s)
