"""The best cuts and policies against all cuts and all policies of small models."""

import itertools
import math
from dataclasses import replace

import pytest

from pipebench.planner.stage_problem import StageProblem
from reports.studies.cuts_and_policies import best_cuts_and_policies, lasts_s
from tests.planner.test_swap_recompute import rows

LAYERS = 6


def stages_of(seed: int, num_stages: int, limit_bytes: float, start: int, stop: int, part: int) -> StageProblem:
    """Return a stage of a straight pipeline that is two minibatches deeper than it has stages."""
    return StageProblem(rows(seed, LAYERS), start, stop, num_stages + 2 - part, limit_bytes, pcie_bytes_per_s=5.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_best_cuts_and_policies_equal_brute_force_s(seed: int, num_stages: int) -> None:
    whole = stages_of(seed, num_stages, math.inf, 0, LAYERS, 0)
    limit = 0.7 * whole.outcome(("keep",) * LAYERS).num_bytes / num_stages

    def stage_of(part: int, start: int, stop: int) -> StageProblem:
        return stages_of(seed, num_stages, limit, start, stop, part)

    best_s = math.inf
    for starts in itertools.combinations(range(1, LAYERS), num_stages - 1):
        slowest_s = 0.0
        for part, (start, stop) in enumerate(itertools.pairwise((0, *starts, LAYERS))):
            stage = stage_of(part, start, stop)
            every = map(stage.outcome, itertools.product(stage.choices, repeat=stop - start))
            slowest_s = max(slowest_s, min((lasts_s(each) for each in every if each.fits), default=math.inf))
        best_s = min(best_s, slowest_s)
    found = best_cuts_and_policies(stage_of, range(1, LAYERS), LAYERS, num_stages)
    if math.isinf(best_s):
        assert found is None
        return
    assert found is not None
    assert found.slowest_s == pytest.approx(best_s)
    assert found.is_exact
    assert found.slowest_s == pytest.approx(max(map(lasts_s, found.outcomes)))
    assert [outcome.problem.start for outcome in found.outcomes] == [0, *found.starts]


def test_stages_that_cannot_fit_have_no_answer() -> None:
    none = best_cuts_and_policies(
        lambda part, start, stop: replace(stages_of(0, 2, 0.0, start, stop, part), constant_bytes=1.0),
        range(1, LAYERS), LAYERS, 2,
    )  # fmt: skip
    assert none is None
