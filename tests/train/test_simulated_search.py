"""A trace of architectures in the simulator: phases, their throughput, and their report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipebench.engine.admission import StopRequest
from pipebench.extensions.moves.rebalancing import RepartitionSearch
from pipebench.extensions.moves.record import record as record_moves
from pipebench.extensions.moves.repartition_plan import CutLayout
from pipebench.extensions.search.setup import search_of
from pipebench.extensions.search.simulated import simulate_search
from pipebench.recipe.load import load, load_file
from pipebench.run.deciding import prepare_job
from pipebench.show.progress import Silent
from pipebench.simulate.steady import simulate_segment
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.largest_minibatch import trial
from pipebench.train.loop import TrainingLoop
from pipebench.train.memory_forecast import MemoryForecast

RECIPE = """
name: trace
model: {{name: cellnet}}
dataset: {{name: mnist5k, image_size: 28, num_train: {train}}}
train: {{minibatch_size: {size}, optimizer: {{lr: 0.1}}, max_epochs: {epochs}}}
cluster: {{name: cluster-a}}
parallelism:
  mode: pipedream
  plan: straight
  cuts: [groups_0_cell3_look, halve_0, groups_1_cell2_look]
  vpipe: {vpipe}
engine: {{kind: simulated}}
search: {{cells: ["groups.*.cell*"], trace: trace.json}}
"""


def job(
    folder: Path, events: Sequence[Mapping[str, object]], epochs: int = 5, vpipe: str = "null", size: int = 50
) -> Job:
    """Return a job of 20 minibatches an epoch."""
    (folder / "trace.json").write_text(json.dumps({"pipebench_search": 1, "events": [*events]}))
    path = folder / "r.yaml"
    path.write_text("# a trace\n" + RECIPE.format(epochs=epochs, vpipe=vpipe, size=size, train=20 * size))
    return prepare_job(load_file(path), silent=True)


def test_phases_follow_each_other_and_drain_where_the_run_evaluates(tmp_path: Path) -> None:
    given = job(tmp_path, [{"minibatch": 30, "delete": 12, "stage": 0}, {"minibatch": 47, "add": 6, "stage": 0}])
    result, _ = simulate_search(given)
    assert result.search is not None
    rows, search = result.search.individuals, search_of(given)
    assert [row.minibatch for row in rows] == [0, 30, 47]
    assert [len(row.cells) for row in rows] == [8, 6, 7]
    clock_s = 0.0
    for row, counts in zip(rows, ([20, 10], [10, 7], [13, 20, 20]), strict=True):
        assert row.second == pytest.approx(clock_s)
        cells = frozenset(i for i, cell in enumerate(search.architectures.cells) if cell.name in row.cells)
        setup = search.architectures.setup(given.setup, cells)
        clock_s += sum(simulate_segment(setup, count).end_s for count in counts)
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


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, False])
def test_with_vpipe_layers_move_as_in_training(tmp_path: Path, live: bool) -> None:
    """The moves are those of the virtual engine in training, to the minibatch and layer."""
    events = [{"minibatch": 60, "delete": 12, "stage": 3}]
    vpipe = f"{{swap: false, recompute: false, live: {str(live).lower()}}}"
    given = job(tmp_path, events, epochs=6, vpipe=vpipe, size=10)
    simulated, _ = simulate_search(given)
    training = prepare_job(load(str(tmp_path / "r.yaml"), ["engine={kind: virtual, threads: 1}"]), silent=True)
    found, _ = TrainingLoop(training, on_virtual_clock(training, StopRequest()), Silent(), lambda point: None).run()
    assert [(m.minibatch, m.cuts, m.live) for m in simulated.moves] == [
        (m.minibatch, m.cuts, m.live) for m in found.moves
    ]
    assert {move.minibatch > 60 for move in simulated.moves} == {False, True}, "the first cuts aren't balanced either"
    for name in ("repartitions", "migration_stall_s", "comm_bytes_activation"):
        assert simulated.metrics[name] == pytest.approx(found.metrics[name])
    assert (simulated.metrics["migration_stall_s"] > 0) is not live
    stays, _ = simulate_search(
        job(tmp_path, events, epochs=6, vpipe="{swap: false, recompute: false, repartition: false}", size=10)
    )
    assert stays.metrics["repartitions"] == stays.metrics["migration_bytes"] == 0 < simulated.metrics["migration_bytes"]
    rates = [result.points[-1].metrics["throughput_samples_per_s"] for result in (stays, simulated)]
    assert rates[1] > 1.05 * rates[0], "three stages had all the work"


def test_moves_of_a_trace_are_recorded_though_its_points_have_no_bytes(tmp_path: Path) -> None:
    given = job(tmp_path, [{"minibatch": 40, "delete": 12, "stage": 3}], vpipe="{swap: false, recompute: false}")
    result, _ = simulate_search(given)
    log = Mock()
    assert result.moves
    assert record_moves(log, result, given).moves == ()
    assert [call.args[0] for call in log.file.call_args_list] == ["cuts.png"]


def test_moves_of_a_run_that_was_stopped_before_its_first_evaluation_are_recorded(tmp_path: Path) -> None:
    """0.2.0 read the time of the last point, of which there was none, so Ctrl-C ended with a traceback."""
    given = job(tmp_path, [{"minibatch": 40, "delete": 12, "stage": 3}], vpipe="{swap: false, recompute: false}")
    result, _ = simulate_search(given)
    log = Mock()
    assert record_moves(log, replace(result, points=()), given).moves == ()
    assert [call.args[0] for call in log.file.call_args_list] == ["cuts.png"]


def test_a_change_at_a_second_comes_after_it_for_all_moves(tmp_path: Path) -> None:
    vpipe = "{swap: false, recompute: false}"
    whole, _ = simulate_search(job(tmp_path, [{"minibatch": 150, "delete": 6, "stage": 0}], 10, vpipe))
    assert whole.moves
    assert whole.search is not None
    moment_s = whole.search.individuals[1].second
    asked_s = moment_s * (1 - 1e-9)
    found = simulate_search(job(tmp_path, [{"second": asked_s, "delete": 6, "stage": 0}], 10, vpipe))[0].search
    assert found is not None
    assert found.individuals[1].minibatch == 150
    assert found.individuals[1].second == pytest.approx(moment_s)


def test_decisions_of_a_trial_simulation_are_not_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of minibatches until a second is found by a trial simulation."""
    sought, next_step = [], RepartitionSearch.next_step

    def counted(stages: RepartitionSearch) -> CutLayout | None:
        if stages.is_needed:
            sought.append((stages.layout, tuple(round(each.seconds, 9) for each in stages.measured)))
        return next_step(stages)

    monkeypatch.setattr(RepartitionSearch, "next_step", counted)
    vpipe = "{swap: false, recompute: false}"
    whole = simulate_search(job(tmp_path, [{"minibatch": 150, "delete": 6, "stage": 0}], 10, vpipe))[0].search
    assert whole is not None
    sought.clear()
    result, _ = simulate_search(
        job(tmp_path, [{"second": whole.individuals[1].second, "delete": 6, "stage": 0}], 10, vpipe)
    )
    assert len(result.moves) > 1
    assert len(sought) == len({*sought}) >= len(result.moves)


def test_the_reported_parts_of_a_phase_with_moves_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipebench.extensions.search.simulated._WINDOW_S", 0.01)
    events = [{"minibatch": 100, "delete": 12, "stage": 3}]
    result, _ = simulate_search(job(tmp_path, events, 10, "{swap: false, recompute: false}"))
    assert len(result.points) > 4
    times = [0.0, *(point.clock_s for point in result.points)]
    samples = [
        point.metrics["throughput_samples_per_s"] * (b - a)
        for point, a, b in zip(result.points, times, times[1:], strict=False)
    ]
    assert sum(samples) == pytest.approx(10_000, rel=1e-6)
    assert min(point.metrics["throughput_samples_per_s"] for point in result.points) == pytest.approx(
        result.metrics["least_throughput_samples_per_s"]
    )


def test_the_ideal_is_the_throughput_of_balanced_workers_that_never_wait(tmp_path: Path) -> None:
    """The seconds of all active layers and of their updates, divided by four workers."""
    given = job(tmp_path, [{"minibatch": 100, "delete": 12, "stage": 3}])
    result, _ = simulate_search(given)
    for point in result.points:
        assert point.metrics["throughput_samples_per_s"] < point.metrics["ideal_throughput_samples_per_s"]
    rows = given.profile.layers[50]
    taken_s = sum(row.forward_s + row.backward_s for row in rows) + sum(
        each.update_s for each in given.setup.costs.stages
    )
    assert result.points[0].metrics["ideal_throughput_samples_per_s"] == pytest.approx(4 * 50 / taken_s)
    first, last = (result.points[index].metrics["ideal_throughput_samples_per_s"] for index in (0, -1))
    assert first <= result.metrics["ideal_throughput_samples_per_s"] <= last


def peaks_of(given: Job, cells: Sequence[str]) -> int:
    """Return the peak memory of the fullest worker with these cells, computed without a trace."""
    found = search_of(given).architectures
    setup = found.setup(given.setup, found.named(cells, "here"))
    return MemoryForecast(replace(given, setup=setup)).memory.fullest.num_bytes


def test_memory_is_predicted_for_every_architecture(tmp_path: Path) -> None:
    """The model grows: its first architecture fits on a device, its last one doesn't."""
    few, all_cells = ["groups.1.*"], ["groups.*.cell*"]
    events = [{"minibatch": 20, "cells": all_cells}]
    given = job(tmp_path, [{"minibatch": 0, "cells": few}, *events])
    least, most = peaks_of(given, few), peaks_of(given, all_cells)
    assert least < most
    cluster = replace(given.cluster, memory_bytes=(least + most) // 2)
    small = replace(given, cluster=cluster, setup=replace(given.setup, cluster=cluster))
    result, _ = simulate_search(small, MemoryForecast(small))
    assert result.metrics["peak_memory_bytes_max"] == max(row["peak_memory_bytes"] for row in result.stages) == most
    layers, second = result.points[1].metrics["active_layers"], result.points[0].clock_s
    sentence = f"with the {layers} layers that there are from {1e3 * second:.1f} ms on: out of memory at "
    assert result.notes["memory"].startswith(sentence)


def test_the_largest_minibatch_fits_with_every_architecture(tmp_path: Path) -> None:
    few, all_cells = ["groups.1.*"], ["groups.*.cell*"]
    given = job(tmp_path, [{"minibatch": 0, "cells": few}, {"minibatch": 20, "cells": all_cells}])
    found = trial(load(str(tmp_path / "r.yaml")), 50)
    assert found.peak_bytes == peaks_of(given, all_cells) > peaks_of(given, few)


def test_costs_of_an_architecture_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{"minibatch": 30, "delete": 12, "stage": 0}]
    first, _ = simulate_search(job(tmp_path, events))
    monkeypatch.delattr("pipebench.extensions.search.architectures.analytic_profile")
    again, _ = simulate_search(job(tmp_path, events))
    assert [point.metrics for point in again.points] == [point.metrics for point in first.points]


def test_samples_that_fill_no_minibatch_are_left_out_for_every_architecture(tmp_path: Path) -> None:
    """If it weren't, each would be profiled at one or two sizes more."""
    given = job(tmp_path, [{"minibatch": 30, "delete": 12, "stage": 0}])
    other = prepare_job(load(str(tmp_path / "r.yaml"), ["train.minibatch_size=48"]), silent=True)
    assert [*given.profile.layers] == [50]
    assert [*other.profile.layers] == [48]
    assert other.setup.sampler.minibatches_per_epoch == 1000 // 48
