"""Sharded modes in the planner: published memory and bytes, groups of layers, and when they are a choice."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.planner.compare import compare
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.memory import MemoryRule, transient_bytes
from pipebench.planner.mode_request import layer_groups
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.planner.state_graph import prefixes
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import MODES
from pipebench.schedule.syncs import SUMS
from tests.oracles import sharding

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "sharding.yaml"
ROWS = {"zero1": "zero1", "zero2": "zero2", "fsdp": "zero3"}


def rows_of(parameters: list[int], *, low: bool = False) -> tuple[LayerProfile, ...]:
    """Return a chain of layers with these numbers of parameters, and the loss."""
    made = [
        LayerProfile(
            f"l{i}", "Linear", 1.0, 2.0, 8, 8, (i - 1,) if i else (), ("x",) if i == 0 else (),
            {f"l{i}.w": count * (2 if low else 4)} if count else {}, {},
            master_sizes={f"l{i}.w": count * 4} if low and count else {},
        )
        for i, count in enumerate(parameters)
    ]  # fmt: skip
    return (*made, LayerProfile("loss", "loss", 0.0, 0.0, 4, 4, (len(made) - 1,)))


def published() -> dict[str, Any]:
    return yaml.safe_load(PUBLISHED.read_text())["zero"]


@pytest.mark.parametrize("mode", ROWS)
def test_memory_of_model_states_equals_the_paper_s(mode: str) -> None:
    """Figure 1 of ZeRO: 7.5e9 parameters on 64 devices, Adam in mixed precision; gathered groups not counted."""
    given = published()
    count, replicas = int(float(given["parameters"])), given["replicas"]
    states = prefixes(rows_of([count], low=True))
    rule = MemoryRule(float("inf"), versions=1, state_bytes_per_byte=2, masters=True, shard=MODES[mode].shard)
    found = rule.num_bytes(states, 0, len(states) - 1, 0, replicas)
    assert found == pytest.approx(sharding.state_bytes(given["formula"][ROWS[mode]], count, replicas), rel=1e-9)
    assert found / 1e9 == pytest.approx(given["gigabytes"][ROWS[mode]], rel=0.02)


def test_groups_are_of_about_equal_parameters() -> None:
    states = prefixes(rows_of([4, 0, 4, 0, 4, 0, 4, 0]))
    assert layer_groups(states, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert layer_groups(states, 2) == [(0, 4), (4, 8)]
    assert layer_groups(states, 100) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert layer_groups(prefixes(rows_of([100, 1])), 8) == [(0, 1), (1, 2)]
    assert layer_groups(prefixes(rows_of([0, 0])), 8) == [(0, 2)]
    assert transient_bytes([1.0, 5.0, 3.0], 2) == [0.0, 5.0, 3.0]
    assert transient_bytes([1.0, 5.0, 3.0], 1) == [0.0, 5.0, 0.0]


def request_of(memory_bytes: int | None) -> Request:
    rows = rows_of([1000] * 8)
    profile = Profile("t", "unit", "file", "", {4: rows}, 1e-9, 0.0, {4: 0.0}, {}, state_bytes_per_byte=2)
    cluster = Cluster("flat", "unit", memory_bytes, (Level("server", 4, 1e6, 1e-6),))
    return Request(profile=profile, cluster=cluster, model=COST_MODELS["overlap"], minibatch_size=4)


@pytest.mark.parametrize("mode", ROWS)
def test_the_bytes_of_a_plan_equal_the_paper_s(mode: str) -> None:
    """Per minibatch, of which a round has one per replica."""
    found = Planner(request_of(None), mode).best()
    assert len(found.plan.stages) == 8
    assert {stage.replicas for stage in found.plan.stages} == {4}
    expected = sharding.sent_bytes(MODES[mode].shard, 4 * 8000, 4) / 4
    assert sum(found.num_bytes.values()) == pytest.approx(expected)


def test_progress_counts_all_modes() -> None:
    """`mode 13 of 15` stood above a table of seventeen."""
    reported: list[str] = []
    found = compare(request_of(None), on_search=reported.append)
    total = 1 + len(found.others) + len(found.refused)
    counts = [tuple(map(int, re.findall(r"\d+", text)[:2])) for text in reported]
    assert {counted for _, counted in counts} == {2, total}
    assert counts[-1][0] <= total
    assert min(number for number, counted in counts if counted == total) == 3


def test_sharding_is_a_choice_where_memory_binds() -> None:
    """Data parallelism needs 4 x 32 kB; a device that holds less gets a sharded mode, as fast as any that fits."""
    whole = Planner(request_of(None), "dp").best().memory_bytes
    free, bound = (compare(request_of(limit), None) for limit in (None, int(whole * 0.8)))
    assert not any(MODES[each.plan.mode].is_sharded for each in (free.best, *free.others))
    tried = {each.plan.mode: each for each in (bound.best, *bound.others)}
    assert {*tried} & {*ROWS}
    limit = whole * 0.8
    assert all(each.memory_bytes <= limit for each in tried.values())
    assert bound.best.minibatch_s == min(each.minibatch_s for each in tried.values())
    every = {name: Planner(replace(request_of(None), row=MODES[name]), name).best() for name in ROWS}  # brute force
    fitting = {name for name, each in every.items() if each.memory_bytes <= limit}
    assert fitting == {*tried} & {*ROWS}


@pytest.mark.parametrize(("share", "chosen"), [(0.95, "zero1"), (0.7, "zero1"), (0.6, "zero2")])
def test_replicas_are_sharded_before_they_recompute(share: float, chosen: str) -> None:
    """Links are fast and layers unequal, so that data parallelism would be fastest, and states are what is too much."""
    given = request_of(None)
    profile = replace(given.profile, layers={4: rows_of([100, *[4000] * 3, *[100] * 4])})
    given = replace(given, profile=profile, cluster=replace(given.cluster, levels=(Level("server", 4, 1e9, 1e-6),)))
    whole = Planner(given, "dp").best().memory_bytes
    bound = replace(given, cluster=replace(given.cluster, memory_bytes=int(whole * share)))
    found = compare(bound, None)
    assert found.best.plan.mode == chosen
    recomputing = [each for each in found.others if MODES[each.plan.mode].recompute]
    assert recomputing
    assert all(each.minibatch_s > found.best.minibatch_s for each in recomputing)
    again = Planner(replace(given, row=replace(MODES["dp"], recompute=True)), "dp").best()
    assert again.minibatch_s > found.best.minibatch_s


@pytest.mark.parametrize(("workers", "is_simulated"), [(64, True), (512, False)])
def test_replicas_that_sum_shards_in_rings_are_simulated(workers: int, is_simulated: bool) -> None:
    """Eight groups of layers would count as 512 replicas; what isn't simulated is charged every sum in full."""
    cluster = Cluster("flat", "unit", None, (Level("server", workers, 1e6, 1e-6),))
    given = replace(request_of(None), cluster=cluster, row=replace(MODES["zero1"], sums="ring"))
    assert Planner(given, "zero1").best().is_simulated is is_simulated


@pytest.mark.parametrize("levels", [((4, 1e6), (4, 1e5)), ((4, 1e5),), ((2, 1e6), (2, 1e6))])
def test_shards_are_summed_in_the_order_that_is_faster_on_the_cluster(levels: tuple[tuple[int, float], ...]) -> None:
    made = tuple(Level(f"l{i}", count, rate, 0.0) for i, (count, rate) in enumerate(levels))
    given = replace(request_of(None), cluster=Cluster("c", "unit", None, made))
    found = Planner(given, "zero1").best().minibatch_s
    either = [Planner(replace(given, row=replace(MODES["zero1"], sums=sums)), "zero1").best() for sums in SUMS]
    assert found == min(each.minibatch_s for each in either)


@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("recompute", [False, True])
def test_groups_of_layers_are_computed_again_one_after_the_other(mode: str, recompute: bool) -> None:
    """The planner's closed form is the simulated peak or little more."""
    given, rows = request_of(None), rows_of([1000] * 8)
    heavy = tuple(replace(row, saved_bytes=50_000) for row in rows[:-1])
    given = replace(given, profile=replace(given.profile, layers={4: (*heavy, rows[-1])}))
    planner = Planner(replace(given, row=replace(MODES[mode], recompute=recompute)), mode)
    found = planner.best()
    assert len(found.plan.stages) == 8
    peaks = planner.simulated_peaks(found)
    assert peaks is not None
    assert max(peaks) <= found.memory_bytes <= 1.08 * max(peaks)
    kept = 8 * 50_000
    assert (found.memory_bytes < kept) is recompute


@pytest.mark.parametrize("sizes", [[1000] * 8, [4000, *[500] * 7], [*[500] * 7, 4000], [500, 4000, 500, 500, 2000]])
@pytest.mark.parametrize(
    ("mode", "accumulate", "reshards"), [("fsdp", 1, False), ("zero2", 3, True), ("fsdp", 3, True), ("fsdp", 3, False)]
)
def test_weights_that_stay_and_gradients_that_accumulate_are_in_memory_at_once(
    mode: str, accumulate: int, reshards: bool, sizes: list[int]
) -> None:
    """Only two groups' were counted, so that plans were said to fit in half of what they need."""
    given, rows = request_of(None), rows_of(sizes)
    row = replace(MODES[mode], reshard_after_forward=reshards)
    given = replace(given, profile=replace(given.profile, layers={4: rows}), row=row, accumulate=accumulate)
    planner = Planner(given, mode)
    found = planner.best()
    peaks = planner.simulated_peaks(found)
    assert peaks is not None
    whole = sum(size for row in rows for size in row.parameter_sizes.values())
    assert whole < max(peaks) <= found.memory_bytes <= 1.17 * max(peaks)
    limited = replace(given, cluster=replace(given.cluster, memory_bytes=max(peaks) - 1))
    with pytest.raises(PlanError, match=f"no plan of mode {mode} fits"):
        Planner(limited, mode).best()


def tied_rows(users: list[int], parameters: int, num_layers: int) -> tuple[LayerProfile, ...]:
    """Return a chain of layers, of which `users` share one weight and the others have one each of the same size."""
    rows = rows_of([parameters] * num_layers)
    shared = {"l.w": 4 * parameters}
    return tuple(replace(row, parameter_sizes=shared) if i in users else row for i, row in enumerate(rows))


@pytest.mark.parametrize(
    ("mode", "users", "num_copies"),
    [
        ("fsdp", [0, 7], 2),  # as of a language model: shards of 8 groups, not all 7 layers' weights at once
        ("zero2", [0, 7], 2),
        ("zero1", [0, 7], 1),  # whole everywhere: a second copy would only cost memory
        ("fsdp", [*range(8)], 1),  # as of ALBERT, whose layers all share: eight copies would be more than one group
        ("fsdp", [3, 4], 1),  # neighbours: two of seven groups together
    ],
)
def test_groups_part_layers_that_share_a_weight_if_that_lowers_the_peak(
    mode: str, users: list[int], num_copies: int
) -> None:
    request = request_of(None)
    profile = replace(request.profile, layers={4: tied_rows(users, 1000, 8)})
    found = Planner(replace(request, profile=profile), mode).best()
    ends = [stage.stop for stage in found.plan.stages]
    assert len({sum(end <= user for end in ends) for user in users}) == num_copies
    assert len(ends) > 1 or num_copies == 1
