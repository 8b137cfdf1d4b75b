"""What `pipebench plan` says about a plan: its bottleneck, copies of tied weights, plans that are too large."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from pipebench.cli.planning import PlanOptions, _answer
from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.plans import Request
from pipebench.planner.states import PlanningCache
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import MODES
from pipebench.show.plan_answer import PlanFindings, plan_data
from pipebench.show.plan_report import print_plan

MB, GB = 1_000_000, 1_000_000_000
UNLIMITED = 10**15


def answer(
    layers: Sequence[tuple[float, int, Mapping[str, int]]],
    level: Level,
    mode: str = "pipedream",
    *,
    memory_bytes: int = UNLIMITED,
    load_s: float = 0.0,
    columns: Mapping[str, Any] | None = None,
    accumulate: int | None = None,
) -> PlanFindings:
    """Return the answer for a chain of layers with (seconds forward, bytes sent, parameters); a backward is twice."""
    rows = [
        LayerProfile(
            f"layer{i}", "Linear", forward_s, 2 * forward_s, sent, sent, (i - 1,) if i else (), () if i else ("x",),
            parameters, saved_bytes=1000,
        )
        for i, (forward_s, sent, parameters) in enumerate(layers)
    ]  # fmt: skip
    rows.append(LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, (len(layers) - 1,)))
    profile = Profile("chain", "V100", "file", "chain", {8: tuple(rows)}, 0.0, 0.0, {8: load_s}, {})
    cluster, row = Cluster("made", "V100", memory_bytes, (level,)), replace(MODES[mode], **(columns or {}))
    request = Request(profile, cluster, COST_MODELS["overlap"], 8, accumulate=accumulate, row=row)
    return _answer("chain", request, mode, PlanOptions(others=False), PlanningCache(), says_samples=True)


def printed(found: PlanFindings) -> str:
    out = io.StringIO()
    print_plan(found, Console(file=out, width=200))
    return out.getvalue()


def test_only_a_stage_that_reads_samples_is_limited_by_loading_them() -> None:
    """Four replicas of the first stage load in 2.5 ms; the second one computes for 6 ms, less than a load takes."""
    found = answer([(4e-3, 100, {"a": 400}), (2e-3, 10, {"b": 400 * MB})], Level("server", 5, 1e9, 0.0), load_s=10e-3)
    data = plan_data(found)
    assert data["config"] == "4-1"
    assert data["bottleneck"] == {"stage": 1, "stages": (1,), "cause": "compute"}
    slow = plan_data(answer([(4e-3, 100, {})], Level("server", 2, 1e9, 0.0), load_s=20e-3))
    assert slow["bottleneck"]["cause"] == "loading"


@pytest.mark.parametrize(
    ("columns", "limits", "update_s"),
    [
        ({}, {}, 2 / 2 * 10 * MB / GB + 2 * 1e-5),
        ({}, {"ring_bytes_per_s": 1e8}, 2 / 2 * 10 * MB / 1e8 + 2 * 1e-5),
        # For the stages of a pipeline this limit replaces the other.
        ({}, {"ring_bytes_per_s": 1e7, "stage_ring_bytes_per_s": 1e8}, 2 / 2 * 10 * MB / 1e8 + 2 * 1e-5),
        ({"sums": "ordered"}, {}, 2 * (10 * MB / 2 / GB + 1e-5)),
        ({"sync": "parameter-server"}, {"ring_bytes_per_s": 1e8}, 2 * (10 * MB / 2 / 1e8 + 1e-5)),
    ],
)
def test_the_sum_of_a_tied_weight_s_copies_takes_what_the_simulator_charges(
    columns: dict[str, Any], limits: dict[str, Any], update_s: float
) -> None:
    words = {"words": 10 * MB}
    layers = [(10e-3, 1000, words), (10e-3, 1000, {}), (10e-3, 1000, words)]
    level = Level("server", 3, 1e9, 1e-5, **limits)
    found = answer(layers, level, "pipedream-flush", columns=columns, accumulate=8)
    (tied,) = plan_data(found)["tied"]
    assert tied["stages"] == (0, 2)
    assert tied["bytes_per_update"] == 2 * 10 * MB
    assert tied["update_s"] == pytest.approx(update_s)


def test_the_prediction_of_a_plan_too_large_to_simulate_is_no_bottleneck_where_it_fills_and_drains() -> None:
    layers = [(1e-3, 100, {f"w{i}": 40}) for i in range(300)]
    found = answer(layers, Level("server", 300, 1e9, 0.0), "pipedream-flush", accumulate=600)
    best = found.comparison.best
    assert not best.is_simulated
    assert best.minibatch_s > 1.4 * best.bottleneck_s
    assert "by the cost model, as so large a plan isn't simulated, 1.50x the bottleneck" in printed(found)
    without = answer(layers, Level("server", 300, 1e9, 0.0))
    assert "samples/s: the bottleneck, as so large a plan isn't simulated" in printed(without)


@pytest.mark.parametrize(("memory_bytes", "config"), [(800 * MB, "3-1"), (1300 * MB, "5-1"), (3 * GB, "7-1")])
def test_plans_fit_in_the_simulator_though_values_wait(memory_bytes: int, config: str) -> None:
    """Up to seven replicas send to one: more waits there than the two for which the closed form has room."""
    found = seven_to_one(memory_bytes)
    assert plan_data(found)["config"] == config
    assert plan_data(found)["over_memory"] == []
    assert "does not fit in the simulator" not in printed(found)


def test_a_plan_that_does_not_fit_in_the_simulator_says_so() -> None:
    found = replace(seven_to_one(800 * MB), over_memory={1: 1500 * MB})
    assert plan_data(found)["over_memory"] == [{"stage": 1, "memory_bytes": 1500 * MB}]
    assert "does not fit in the simulator" in printed(found)
    assert "stage 1 needs 1.50 GB of the 800 MB" in printed(found)


def seven_to_one(memory_bytes: int) -> PlanFindings:
    """Plan two layers for eight workers of which seven could run the first, if there is enough memory."""
    layers: list[tuple[float, int, dict[str, int]]]
    layers = [(6.3e-3, 100 * MB, {"a": 4000}), (1e-3, 10, {"b": 100 * MB})]
    return answer(layers, Level("server", 8, 1e11, 0.0, ring_bytes_per_s=1e9), memory_bytes=memory_bytes)
