"""The busy share of every stage's workers: shares add up to those of all workers, and to the recomputation."""

import pytest

from pipebench.recipe.load import load
from pipebench.train.prepare import prepare
from pipebench.train.result import RunResult
from pipebench.train.simulated import simulate_epoch

CASES = [
    ("uniform/pipedream", ()),
    ("uniform/gpipe", ("parallelism.order=1f1b", "parallelism.microbatches=4", "parallelism.recompute=true")),
    ("uniform/pipedream", ("parallelism.plan=2-1-1", "parallelism.recompute=true")),
    ("uniform/pipedream-flush", ("parallelism.recompute=true",)),
    # Of a short epoch: five minibatches, the last with half of the samples, which are two rounds of four.
    ("quickstart/dp", ("dataset.num_train=144",)),
    ("quickstart/gpipe", ("dataset.num_train=144", "parallelism.recompute=true")),
    ("modes/interleaved", ("dataset.num_train=144",)),
    # A server makes the updates, beside its worker.
    ("modes/dp-asp", ()),
    # Drains within an update, which then has fewer minibatches.
    ("modes/pipedream-flush", ("parallelism.accumulate=4", "train.evaluate_every={minibatches: 1}")),
]


def result_of(name: str, *overrides: str) -> RunResult:
    loaded = load(name, ["engine.kind=simulated", *overrides])
    return simulate_epoch(prepare(loaded.recipe, loaded.cluster))[0]


@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_stages_add_up_to_all_workers(name: str, overrides: tuple[str, ...]) -> None:
    result = result_of(name, *overrides)
    metrics, workers = result.metrics, result.metrics["num_workers"]
    effective, again = (
        sum(row[share] * row["replicas"] for row in result.stages) / workers
        for share in ("effective_fraction", "recompute_fraction")
    )
    assert effective == pytest.approx(metrics["effective_fraction"], rel=1e-3)
    assert again == pytest.approx(metrics["recompute_fraction"], rel=1e-3, abs=1e-12)
    assert (again > 0) == ("parallelism.recompute=true" in overrides)


def test_stages_have_no_share_if_lengths_vary() -> None:
    result = result_of("gnmt8/1x4-a-pipedream", "dataset.lengths=declared")
    assert not any("effective_fraction" in row for row in result.stages)
