"""A trace of architectures in the simulator: phases, their pace, and what is told of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pipebench.recipe.load import load_file
from pipebench.run.deciding import prepare_job
from pipebench.simulate.steady import simulate_segment
from pipebench.train.job import Job
from pipebench.train.simulated_search import simulate_search

RECIPE = """
name: trace
model: {{name: cellnet}}
dataset: {{name: mnist5k, image_size: 28, num_train: 1000}}
train: {{minibatch_size: 50, optimizer: {{lr: 0.1}}, max_epochs: {epochs}}}
cluster: {{name: cluster-a}}
parallelism:
  mode: pipedream
  plan: straight
  cuts: [groups_0_cell3_look, halve_0, groups_1_cell2_look]
  vpipe: {vpipe}
engine: {{kind: simulated}}
search: {{cells: ["groups.*.cell*"], trace: trace.json}}
"""


def job(folder: Path, events: Sequence[Mapping[str, object]], epochs: int = 5, vpipe: str = "null") -> Job:
    (folder / "trace.json").write_text(json.dumps({"pipebench_search": 1, "events": [*events]}))
    path = folder / "r.yaml"
    path.write_text("# a trace\n" + RECIPE.format(epochs=epochs, vpipe=vpipe))
    return prepare_job(load_file(path), silent=True)


def test_phases_follow_each_other_and_each_is_a_segment_of_its_own(tmp_path: Path) -> None:
    given = job(tmp_path, [{"minibatch": 30, "delete": 12, "stage": 0}, {"minibatch": 47, "add": 6, "stage": 0}])
    result, _ = simulate_search(given)
    assert result.search is not None
    rows, search = result.search.individuals, given.search
    assert search is not None
    assert [row.minibatch for row in rows] == [0, 30, 47]
    assert [len(row.cells) for row in rows] == [8, 6, 7]
    clock_s = 0.0
    for row, count in zip(rows, (20 + 10, 17, 20 + 20 + 13), strict=True):
        assert row.second == pytest.approx(clock_s)
        cells = frozenset(i for i, cell in enumerate(search.architectures.cells) if cell.name in row.cells)
        setup = search.architectures.setup(given.setup, cells)
        epochs, rest = divmod(count, 20)
        clock_s += epochs * simulate_segment(setup, 20).end_s + (simulate_segment(setup, rest).end_s if rest else 0.0)
    assert result.metrics["total_time_s"] == pytest.approx(clock_s)
    assert [point.samples for point in result.points] == [1500, 2350, 5000]
    assert [point.clock_s for point in result.points] == pytest.approx([rows[1].second, rows[2].second, clock_s])
    assert [point.metrics["active_layers"] for point in result.points] == [row.layers for row in rows]
    assert result.metrics["throughput_samples_per_s"] == pytest.approx(5000 / clock_s)


def test_a_bottleneck_that_loses_layers_makes_it_faster_until_another_stage_is_the_slowest(tmp_path: Path) -> None:
    given = job(tmp_path, [{"minibatch": 40, "delete": 6, "stage": 0}])
    rates = [point.metrics["throughput_samples_per_s"] for point in simulate_search(given)[0].points]
    slowest = max(range(4), key=lambda s: given.setup.costs.stages[s].forward_s[50])
    assert slowest == 0
    assert rates[1] > rates[0]


def test_changes_at_seconds_come_at_the_end_of_the_minibatch_in_which_they_fall(tmp_path: Path) -> None:
    whole = simulate_search(job(tmp_path, [{"minibatch": 50, "delete": 6, "stage": 0}]))[0]
    assert whole.search is not None
    moment_s = whole.search.individuals[1].second
    found = simulate_search(job(tmp_path, [{"second": 0.9 * moment_s, "delete": 6, "stage": 0}]))[0].search
    assert found is not None
    change = found.individuals[1]
    assert change.second == pytest.approx(0.9 * moment_s, rel=0.05)
    assert change.minibatch == pytest.approx(45, abs=2)


def test_with_vpipe_layers_follow_the_changes_and_what_moves_takes_its_time(tmp_path: Path) -> None:
    events = [{"minibatch": 40, "delete": 12, "stage": 3}]
    vpipe = "{{swap: false, recompute: false, repartition: {}}}"
    stays, follows = (job(tmp_path, events, vpipe=vpipe.format(word)) for word in ("false", "true"))
    (fixed, _), (moved, _) = simulate_search(stays), simulate_search(follows)
    first, second = ([point.metrics["throughput_samples_per_s"] for point in each.points] for each in (fixed, moved))
    assert first[0] == second[0]
    assert second[1] > 1.05 * first[1], "three stages had all the work"
    assert (fixed.metrics["repartitions"], moved.metrics["repartitions"]) == (0, 1)
    assert fixed.metrics["migration_bytes"] == 0 < moved.metrics["migration_bytes"]
    assert moved.search is not None
    gap_s = moved.search.individuals[1].second - moved.points[0].clock_s
    assert moved.metrics["migration_stall_s"] == pytest.approx(gap_s)
    assert gap_s > follows.cluster.levels[0].latency_s
