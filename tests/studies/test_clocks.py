"""Times of stored trainings equal the current simulator's: their clocks are simulated again without arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipebench.recipe.catalog import find, recipe_names
from pipebench.recipe.load import load, load_file
from pipebench.report.kept import KeptResult, kept_results
from pipebench.train.result import DIVERGED, RunResult
from reports.studies import kept_runs
from reports.studies.clocks import played_again
from tests.shortcuts import evaluate_few_digits

REPORTS = Path(__file__).parents[2] / "reports"
LITTLE = ("dataset.num_train=96", "train.minibatch_size=8", "train.max_epochs=2", "model.width=0.0625")


def stored_by_recipe() -> dict[str, KeptResult]:
    """Return the quickest stored result of every recipe."""
    found: dict[str, KeptResult] = {}
    for kept in sorted(kept_results(REPORTS).values(), key=lambda each: each.result.metrics["wall_time_s"]):
        found.setdefault(" ".join(kept.words[:2]), kept)
    return found


STORED = stored_by_recipe()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", STORED)
def test_stored_results_have_the_current_simulator_s_times(name: str) -> None:
    """If they haven't, `nox -s kept -- clocks` gives them these."""
    kept = STORED[name]
    assert played_again(load_file(find(kept.words[0], recipe_names), kept.words[1:]), kept.result) is None


@pytest.fixture
def _few_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate_few_digits(monkeypatch, 40)  # a thousand digits take longer than LITTLE trains


@pytest.mark.usefixtures("_few_are_evaluated")
@pytest.mark.parametrize(("mode", "plan"), [("dp-asp", "auto"), ("pipedream", "straight")])
def test_a_clock_simulated_again_equals_training_s(mode: str, plan: str) -> None:
    overrides = [*LITTLE, f"parallelism.mode={mode}", f"parallelism.plan={plan}", "train.target=null"]
    loaded = load("quickstart", overrides)
    result, _, _ = kept_runs.trained(loaded)
    assert played_again(loaded, result) is None
    late = [replace(point, clock_s=1.01 * point.clock_s) for point in result.points]
    wrong = {name: 1.01 * value if name.endswith("_s") else value for name, value in result.metrics.items()}
    mended = played_again(loaded, replace(result, points=tuple(late), metrics=wrong))
    assert mended is not None
    assert times(mended) == pytest.approx(times(result))
    with pytest.raises(RuntimeError, match="evaluated after samples"):
        played_again(loaded, replace(result, points=result.points[:1] * 3))
    with pytest.raises(RuntimeError, match="evaluates more often than what is kept"):
        played_again(loaded, replace(result, points=result.points[:1]))
    with pytest.raises(RuntimeError, match="comm_bytes_level_server"):
        played_again(loaded, replace(result, metrics={**result.metrics, "comm_bytes_level_server": 7}))
    with pytest.raises(RuntimeError, match="diverged, and a clock ends at the last evaluation"):
        played_again(loaded, replace(result, outcome=DIVERGED))


@pytest.mark.usefixtures("_few_are_evaluated")
def test_another_order_of_pushes_needs_training_again() -> None:
    """It depends on the clock, and the weights on it."""
    words = [*LITTLE, "parallelism.mode=dp-asp", "parallelism.plan=auto", "train.target=null", "cluster.servers=2"]
    result, _, _ = kept_runs.trained(load("quickstart", words))
    assert result.metrics["staleness_max"] > 0
    with pytest.raises(RuntimeError, match="staleness_"):
        played_again(load("quickstart", [*words, "cluster.bandwidth=100 Gbit/s"]), result)


def times(result: RunResult) -> list[float]:
    names = ("total_time_s", "epoch_time_s", "evaluation_time_s", "throughput_samples_per_s", "bubble_fraction")
    return [*(result.metrics[name] for name in names), *(point.clock_s for point in result.points)]
