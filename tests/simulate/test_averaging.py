"""Minibatches of varying length: simulations against closed formulas, and estimates against simulations."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.engine.setup import Setup
from pipebench.model.sampling import Size, UnitShape, Varying
from pipebench.simulate.averaging import regressed
from pipebench.simulate.costs import Costs, StageCosts
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import simulate_all, simulate_segment
from tests.oracles.varying import data_parallel_s, straight_s
from tests.support import Blobs, Mlp, make_setup

LENGTHS = [(3, 0.25), (7, 0.5), (20, 0.25)]
FORWARD_S = {3: 1.0, 7: 1.5, 20: 4.0}
PLANS = [([], [1]), ([2, 4, 6], [1] * 4), ([4], [3, 1]), ([], [3]), ([2, 4], [1, 2, 1])]
COLUMNS: list[dict[str, Any]] = [{"weights": "stash"}, {"weights": "one", "microbatches": 2, "order": "all-forwards"}]


def varying_setup(
    plan: tuple[list[int], list[int]], num_minibatches: int, seed: int = 0, short: int = 4, **how: Any
) -> Setup:
    """Return a setup whose costs depend on lengths, the later a stage the more."""
    num_samples = 4 * (num_minibatches - 1) + short
    sampler = Varying(num_samples, 4, seed, LENGTHS)
    free = Cluster("free", "unit", None, (Level("server", 99, 1e30, 0.0),))
    setup = make_setup(Mlp(), plan, dataset=Blobs(16, 4), sampler=sampler, **{"cluster": free, **how})
    shapes = [UnitShape(n, columns) for n in range(1, 5) for columns, _ in LENGTHS]
    stages = [_varied(stage, index, shapes) for index, stage in enumerate(setup.costs.stages)]
    sizes: dict[Size, int] = {0: 0, **{s: s.num_samples * s.columns for s in shapes}}
    forward, back = (dict.fromkeys(each, sizes) for each in (setup.costs.activation_bytes, setup.costs.gradient_bytes))
    return replace(setup, costs=Costs(tuple(stages), forward, back))


def _varied(stage: StageCosts, index: int, shapes: Sequence[UnitShape]) -> StageCosts:
    def seconds(scale: float) -> dict[Size, float]:
        return {0: 0.0, **{s: scale * s.num_samples * FORWARD_S[s.columns] / 4 for s in shapes}}

    slow = 1 + index / 10
    return replace(
        stage, forward_s=seconds(slow), backward_s=seconds(2 * slow), load_s=seconds(0.0), weight_s=seconds(slow),
        update_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_time_of_a_straight_pipeline_follows_its_rules(num_stages: int) -> None:
    starts = [2, 4, 6][: num_stages - 1]
    setup = varying_setup((starts, [1] * num_stages), 60, short=1)
    samples = [4] * 59 + [1]
    scale = [[(1 + s / 10) * n / 4 for s in range(num_stages)] for n in samples]
    drawn = [FORWARD_S[setup.sampler.columns(k)] for k in range(60)]  # type: ignore[attr-defined]
    forward = [[seconds * each for each in row] for seconds, row in zip(drawn, scale, strict=True)]
    backward = [[2 * each for each in row] for row in forward]
    assert len(set(drawn)) == 3
    assert simulate_all(setup, 60).end_s == pytest.approx(straight_s(forward, backward), rel=1e-9)


def test_data_parallelism_waits_for_the_longest_of_every_round() -> None:
    setup = varying_setup(([], [3]), 60)
    drawn = [3 * FORWARD_S[setup.sampler.columns(k)] for k in range(60)]  # type: ignore[attr-defined]
    assert simulate_all(setup, 60).end_s == pytest.approx(data_parallel_s(drawn, 3), rel=1e-9)
    assert data_parallel_s(drawn, 3) > 1.3 * sum(drawn) / 3, "rounds of one length would test nothing"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("columns", COLUMNS, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_estimates_agree_with_simulations(plan: tuple[list[int], list[int]], columns: dict[str, Any]) -> None:
    cluster = Cluster("flat", "unit", None, (Level("server", 4, 1e3, 1e-3),))
    setup = varying_setup(plan, 3001, short=3, cluster=cluster, **columns)
    meters = [Meter(setup.pipeline), Meter(setup.pipeline)]
    whole, part = simulate_all(setup, 3001, meters[0]), simulate_segment(setup, 3001, meters[1])
    assert (whole.num_simulated, whole.error_s) == (0, 0.0)
    assert 0 < part.num_simulated < 2000, "nothing was estimated, so this would test nothing"
    assert 0 < part.error_s < 0.01 * part.end_s or plan == ([], [1])
    # What is estimated is the mean of all that could be drawn: what was drawn differs from that, too.
    assert part.end_s == pytest.approx(whole.end_s, rel=0.025)
    assert part.busy_s == pytest.approx(whole.busy_s, rel=0.025)
    for key, num_bytes in whole.num_bytes.items():
        assert part.num_bytes[key] == pytest.approx(num_bytes, rel=0.025)


def test_errors_of_estimates_agree_with_the_standard_error() -> None:
    """Of many seeds: never by much more; by less where what one block loses the next one wins."""
    off = []
    for seed in range(8):
        setup = varying_setup(([2, 4, 6], [1] * 4), 100_000, seed=seed)
        part = simulate_segment(setup, 100_000)
        off.append((part.end_s, part.error_s))
    mean_s = statistics.fmean(end_s for end_s, _ in off)
    ratios = [(end_s - mean_s) / error_s for end_s, error_s in off]
    assert 0.2 < math.sqrt(statistics.fmean(ratio**2 for ratio in ratios)) < 1.7


def test_an_epoch_of_few_minibatches_is_simulated_whole() -> None:
    setup = varying_setup(([4], [1, 1]), 30)
    assert simulate_segment(setup, 30) == simulate_all(setup, 30)


def test_one_length_repeats_itself() -> None:
    setup = varying_setup(([4], [1, 1]), 2000)
    assert isinstance(setup.sampler, Varying)
    setup = replace(setup, sampler=setup.sampler.of_length(7))
    part = simulate_segment(setup, 2000)
    assert part.num_simulated == 0
    assert part.end_s == pytest.approx(simulate_all(setup, 2000).end_s, rel=1e-9)


def test_a_correlated_known_mean_improves_an_estimate() -> None:
    draws = random.Random(1)
    known = [draws.gauss(5.0, 1.0) for _ in range(32)]
    values = [3 + 2 * each + draws.gauss(0.0, 0.01) for each in known]
    found, error = regressed(values, [known], [5.0])
    assert found == pytest.approx(13.0, abs=0.01)
    assert error < 0.01 < statistics.stdev(values) / math.sqrt(32)
    alone, plain = regressed(values, [[1.0] * 32], [1.0])
    assert alone == pytest.approx(statistics.fmean(values))
    assert plain == pytest.approx(statistics.stdev(values) / math.sqrt(32), rel=1e-6)
