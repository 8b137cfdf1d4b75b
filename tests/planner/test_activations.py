"""Activation bytes of stages whose layers have policies, and the plans chosen by them, against brute force."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.model.plan import StagePlan, as_they_run
from pipebench.planner.activations import MOST_ON_DEVICE, Activations
from pipebench.planner.cost_models import COST_MODELS, StageGrid, UnitWork
from pipebench.planner.flat import SearchStage
from pipebench.planner.memory import MemoryRule
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.planner.state_graph import prefixes
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import KEEP, MODES, RECOMPUTE, SWAP
from pipebench.simulate.memory import kept_bytes, swapped_bytes
from tests.planner.problems import chain
from tests.planner.test_swap_recompute import rows

POLICIES = (KEEP, RECOMPUTE, SWAP)
WORKERS, LAYERS = 4, 6


def with_storages(seed: int, num_layers: int) -> tuple[LayerProfile, ...]:
    """Return layers that save, return and read a few storages."""
    draw = random.Random(seed)
    sizes = {number: draw.randrange(1, 50) for number in range(15)}

    def some(numbers: range, most: int) -> tuple[tuple[int, int], ...]:
        return tuple((number, sizes[number]) for number in draw.sample(numbers, draw.randrange(most)))

    return tuple(
        LayerProfile(
            f"layer{index}", "Linear", 1.0, 2.0, 5, 5,
            tuple(sorted({max(0, index - 1 - draw.randrange(3)) for _ in range(2)})) if index else (),
            saved_bytes=draw.randrange(9), saved_storages=some(range(12), 4),
            output_storages=some(range(12), 3) or ((0, sizes[0]),),
            input_storages=some(range(12, 15), 2), runs_once=draw.random() < 0.3,
        )
        for index in range(num_layers + 1)
    )  # fmt: skip


@pytest.mark.parametrize("make", [rows, with_storages])
@pytest.mark.parametrize("seed", range(30))
def test_bytes_of_every_stage_equal_those_of_its_tensors(make: type, seed: int) -> None:
    """Exactly `kept_bytes` of each stage, whether or not a profile identifies storages."""
    draw = random.Random(seed)
    count = draw.randrange(1, 8)
    made = make(seed, count)
    memory = as_they_run(made[:-1], [draw.choice(POLICIES) for _ in range(count)])
    found = Activations(made, memory, 10.0).of(range(count), [*range(count), count + 1])
    for start, stop in itertools.combinations(range(count + 1), 2):
        stage = StagePlan(start, stop, 1, (0,), memory[start:stop])
        swapped = swapped_bytes(made, stage)
        assert found.stays_bytes[start, stop] == kept_bytes(made, stage, {}) - swapped
        assert found.swapped_bytes[start, stop] == swapped


def test_a_stage_s_bytes_and_seconds_by_hand() -> None:
    """A layer keeps 8 and swaps 10; the next reads its 4 and is recomputed; copies take 10 s, a forward 2 s."""
    made = [
        LayerProfile("a", "Linear", 1.0, 1.0, 6, 6, saved_bytes=8),
        LayerProfile("b", "Linear", 1.0, 3.0, 4, 4, (0,), saved_bytes=10),
        LayerProfile("c", "Linear", 5.0, 5.0, 2, 2, (1,), saved_bytes=7),
        LayerProfile("loss", "loss", 0.5, 0.5, 4, 4, (2,), saved_bytes=1),
    ]
    activations = Activations(made, (KEEP, SWAP, RECOMPUTE), 1.0)
    found = activations.virtual(0, 4)
    assert (found.kept, found.swapped, found.recomputed) == (1, 1, 1)
    assert (found.swapped_bytes, found.copies_s, found.window_s, found.again_s) == (10, 20.0, 17.0, 5.5)
    assert (found.waits_s, found.is_hidden) == (20.0 - 17.0, False)
    assert activations.of([0], [2, 4]).late_s.tolist() == [[20.0 - 6.0, 20.0 - 17.0]]
    assert activations.of([0], [4]).stays_bytes.tolist() == [[8 + 4]]


def in_flight_bytes(
    made: Sequence[LayerProfile], stage: StagePlan, pcie: float | None, versions: int
) -> Callable[[int], float]:
    """Return a stage's bytes by units in flight: of d that swap, min(d, 3 + (d - 1) l) are on the device.

    l is the fraction of a copy that a forward doesn't hide.
    """
    own = [*range(stage.start, stage.stop), *([len(made) - 1] if stage.stop == len(made) - 1 else [])]
    policies = dict(zip(own, (*stage.memory, stage.memory[-1]), strict=False))
    swapped = swapped_bytes(made, stage)
    cuts = [cut for cut in (stage.start, stage.stop) if 0 < cut < len(made) - 1]
    once = (versions + 1) * sum(made[index].parameter_bytes for index in own)
    once += sum(made[index].saved_bytes for index in own if policies[index] == RECOMPUTE)
    once += 2 * sum(made[cut - 1].output_bytes for cut in cuts)
    stays, late = kept_bytes(made, stage, {}) - swapped, 0.0
    if pcie and swapped:
        late = max(0.0, 1 - sum(made[index].forward_s for index in own) / (swapped / pcie))
    return lambda d: once + d * stays + min(d, MOST_ON_DEVICE + (d - 1) * late) * swapped


@pytest.mark.parametrize("pcie", [None, 1e9, 1e10])
@pytest.mark.parametrize("seed", range(10))
def test_swapping_stages_get_the_fewest_replicas_that_fit(seed: int, pcie: float | None) -> None:
    draw, made = random.Random(seed), chain(LAYERS, seed)
    memory = tuple(draw.choice(POLICIES) for _ in range(LAYERS))
    states = prefixes(made).recomputing(memory)
    states = replace(states, activations=Activations(made, memory, pcie))
    rule = MemoryRule(draw.choice([2e7, 5e7, 1e8]), versions=1)
    for start, stop in itertools.combinations(range(LAYERS + 1), 2):
        num_bytes = in_flight_bytes(made, StagePlan(start, stop, 1, (0,), memory[start:stop]), pcie, 1)
        for in_flight in (1, 2, 3, 4, 9):
            assert rule.num_bytes(states, start, stop, in_flight) == pytest.approx(num_bytes(in_flight))
        parts = rule.parts(StageGrid(UnitWork(states), np.array([start]), stop))
        for after in (0, 3, 11):
            fitting = (m for m in range(1, 13) if num_bytes(1 + -(-after // m)) <= rule.limit_bytes)
            assert rule.least(parts, np.full(LAYERS + 1 - stop, float(after)), 12)[0] == next(fitting, np.inf)


def request(seed: int, cost_model: str, limit_bytes: int | None) -> Request:
    """Return a request for four workers and a chain of random layers, some swapped and some recomputed."""
    draw = random.Random(seed)
    made = [replace(row, output_bytes=row.output_bytes // 50, gradient_bytes=0) for row in chain(LAYERS, seed)]
    profile = Profile("chain", "drawn", "file", "drawn", {1: tuple(made)}, 0.0, 0.0, {}, {})
    cluster = Cluster("drawn", "drawn", limit_bytes, (Level("server", WORKERS, 1e11, 0.0),))
    cluster = replace(cluster, pcie_bytes_per_s=draw.choice([1e9, 3e9, 1e10]))
    memory = tuple(draw.choice((KEEP, SWAP, SWAP, RECOMPUTE)) for _ in range(LAYERS))
    return Request(profile, cluster, COST_MODELS[cost_model], 1, memory=memory)


def every_plan(of: Planner) -> list[PlanEstimate]:
    """Return all plans of a chain on four workers."""
    found = []
    for count in range(1, WORKERS + 1):
        for cuts in itertools.combinations(range(1, LAYERS), count - 1):
            bounds = [*itertools.pairwise([0, *cuts, LAYERS])]
            for widths in itertools.product(range(1, WORKERS), repeat=count):
                if sum(widths) <= WORKERS:
                    found.append([SearchStage(a, b, m) for (a, b), m in zip(bounds, widths, strict=True)])
            found += [[SearchStage(0, LAYERS, WORKERS)]] if count == 1 else []
    return [of.estimate("all", stages) for stages in found]


def peak(of: Planner, plan: PlanEstimate) -> int:
    """Return the simulated peak of the fullest worker."""
    peaks = of.simulated_peaks(plan)
    assert peaks is not None
    return max(peaks)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cost_model", ["sosp19", "artifact"])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_plan_of_all_that_fit_in_the_simulator_is_chosen(seed: int, cost_model: str) -> None:
    """The formula's buffers for messages differ from simulated ones by 3%: plans so near the limit may fit or not."""
    free = Planner(request(seed, cost_model, None), "pipedream")
    plans = [(peak(free, each), each) for each in every_plan(free)]
    most = max(num_bytes for num_bytes, _ in plans)
    for share in (0.35, 0.5, 0.7):
        limit = int(share * most)
        surely = min((each.bottleneck_s for num_bytes, each in plans if num_bytes < 0.97 * limit), default=np.inf)
        perhaps = min((each.bottleneck_s for num_bytes, each in plans if num_bytes < 1.03 * limit), default=np.inf)
        try:
            best = Planner(request(seed, cost_model, limit), "pipedream").best()
        except PlanError:
            assert surely == np.inf
            continue
        if best.plan.depth == best.plan.noam:  # else nothing fits but what has fewer in flight
            assert perhaps * (1 - 1e-9) <= best.bottleneck_s <= surely * (1 + 1e-9)
        assert peak(free, best) < 1.03 * limit


def straight(made: Sequence[LayerProfile], num_workers: int, limit_bytes: int | None, pcie: float) -> Request:
    """Return a request for a straight plan."""
    profile = Profile("chain", "drawn", "file", "drawn", {1: tuple(made)}, 0.0, 0.0, {}, {})
    cluster = Cluster("drawn", "drawn", limit_bytes, (Level("server", num_workers, 1e11, 0.0),), pcie_bytes_per_s=pcie)
    row = replace(MODES["pipedream"], shape="straight")
    return Request(profile, cluster, COST_MODELS["sosp19"], 1, depth=num_workers, row=row)


def equal_layers(saved: Sequence[int]) -> list[LayerProfile]:
    """Return layers that take 2 s and save `num_bytes` each, and a loss."""
    made = [
        LayerProfile(f"layer{index}", "Linear", 1.0, 1.0, 1, 1, (index - 1,) if index else (), saved_bytes=num_bytes)
        for index, num_bytes in enumerate(saved)
    ]
    return [*made, LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, (len(saved) - 1,))]


def test_layers_that_swap_have_a_plan_where_keeping_has_none() -> None:
    """Six layers of 100 bytes: stages of 1, 2 and 3 layers keep 300, 400 and 300; six that swap 300 at most."""
    keeping = straight(equal_layers([100] * 6), 6, 350, 1e3)
    with pytest.raises(PlanError, match=r"what would help: .*parallelism.swap_layers: \['\*'\]"):
        Planner(keeping, "pipedream").best()
    planner = Planner(replace(keeping, memory=(SWAP,) * 6), "pipedream")
    found = planner.best()
    assert (found.plan.replicas, found.plan.depth) == ((1,) * 6, 6)
    assert 300 <= found.memory_bytes <= 350 >= peak(planner, found)


def test_copies_too_slow_to_free_memory_leave_plans_refused() -> None:
    """A copy takes 1000 s, so six units of the first stage are on the device, as if it kept them."""
    late = straight(equal_layers([100] * 6), 6, 350, 0.1)
    with pytest.raises(PlanError, match="no plan of mode pipedream fits"):
        Planner(replace(late, memory=(SWAP,) * 6), "pipedream").best()


def test_cuts_separate_layers_whose_copies_would_be_late_in_one_stage() -> None:
    """Eight layers of 2 s; the copies of the first and the fourth take 6.5 s each, there and back."""
    keeping = straight(equal_layers([13, 0, 0, 13, 0, 0, 0, 0]), 2, None, 4.0)
    swapping = replace(keeping, memory=(SWAP, KEEP, KEEP, SWAP, KEEP, KEEP, KEEP, KEEP))
    for asked, starts, seconds in ((keeping, [4], 8.0), (swapping, [3], 10.0)):
        planner = Planner(asked, "pipedream")
        assert planner.starts_of((1, 1)) == starts
        assert planner.for_replicas((1, 1)).bottleneck_s == planner.best().bottleneck_s == pytest.approx(seconds)
