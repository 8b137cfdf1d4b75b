"""Sweeps over a quantity: the lines along it, which line is first where, and the picture."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipebench.show.comparison import groups, headings, speed_ups
from pipebench.show.sweep_lines import Sweep, SweepPoint, sweep_of, sweeps_of
from pipebench.show.sweep_picture import sweep_figure
from pipebench.show.verdict import verdict
from pipebench.train.result import COMPLETED, MISSED, REACHED, RunResult
from pipebench.units import quantity
from tests.results import DP

RATES = {"dp": {"1 Gbit/s": 100.0, "10Gbit/s": 900.0, "100 Gbit/s": 1000.0},
         "pipedream": {"1 Gbit/s": 500.0, "10Gbit/s": 950.0, "100 Gbit/s": 960.0}}  # fmt: skip


def swept(mode: str, bandwidth: str) -> RunResult:
    varied = {"cluster.bandwidth": bandwidth, "parallelism.mode": mode}
    metrics = {"throughput_samples_per_s": RATES[mode][bandwidth], "num_workers": 4 if mode == "dp" else 3}
    name = f"quickstart-bandwidth={bandwidth},{mode}"
    recipe = {"name": "quickstart", **varied}
    return replace(DP, name=name, mode=mode, outcome=COMPLETED, metrics=metrics, varied=varied, recipe=recipe)


RESULTS = [swept(mode, bandwidth) for bandwidth in ("100 Gbit/s", "1 Gbit/s", "10Gbit/s") for mode in RATES]


def found_sweep() -> Sweep:
    (group,) = groups(RESULTS)
    sweep = sweep_of(group)
    assert sweep is not None
    return sweep


def test_a_sweep_has_a_line_per_mode_in_order_of_the_quantity() -> None:
    sweep = found_sweep()
    assert (sweep.key, sweep.metric) == ("cluster.bandwidth", "throughput_samples_per_s")
    assert {*sweep.lines} == {*RATES}
    rates = {"1 Gbit/s": (1.25e8, 500.0), "10Gbit/s": (1.25e9, 950.0), "100 Gbit/s": (1.25e10, 960.0)}
    assert sweep.lines["pipedream"] == [SweepPoint(x, text, rate) for text, (x, rate) in rates.items()]


def test_the_crossover_of_modes_is_reported() -> None:
    sentences = verdict(groups(RESULTS)[0])
    reported = "pipedream from 1 Gbit/s to 10Gbit/s, dp at 100 Gbit/s"
    assert sentences[0] == f"Along cluster.bandwidth, highest in throughput: {reported}."
    assert "efficiency" not in headings(RESULTS), "a plan that leaves workers idle is no sweep over their number"


def test_a_tie_changes_nothing_and_one_line_is_no_crossover() -> None:
    near = [SweepPoint(1.0, "1", 5.0), SweepPoint(2.0, "2", 6.0)]
    times = Sweep("k", "time_to_accuracy_s", {"a": near, "b": [SweepPoint(1.0, "1", 7.0), SweepPoint(2.0, "2", 5.999)]})
    assert [*times.first_places()] == [("a", "1", "2")]
    alone = [each for each in RESULTS if each.mode == "dp"]
    assert verdict(groups(alone)[0])[0].startswith("bandwidth=100 Gbit/s,dp has the highest throughput")


def test_equal_lines_are_first_together() -> None:
    """A plan of pipedream was dp itself, and dp alone was first at every place."""
    reported = []
    for rates in ({"dp": 5.0, "pipedream": 5.0 * (1 + 1e-12)}, {"dp": 5.0, "pipedream": 5.001}):
        results = [
            replace(each, outcome=COMPLETED, metrics={"throughput_samples_per_s": rates[each.mode], "num_workers": 4})
            for each in RESULTS
        ]
        reported.append(verdict(groups(results)[0])[0])
    assert reported[0].startswith("dp and pipedream are highest in throughput at every ")
    assert reported[1].startswith("pipedream is highest in throughput at every ")


def of_numbers(size: str, servers: str) -> RunResult:
    varied = {"train.minibatch_size": size, "cluster.servers": servers}
    metrics = {"throughput_samples_per_s": float(size) * float(servers), "num_workers": 4}
    name = f"quickstart-minibatch_size={size},servers={servers}"
    recipe = {"name": "quickstart", **varied}
    return replace(DP, name=name, outcome=COMPLETED, metrics=metrics, varied=varied, recipe=recipe)


def test_lists_of_numbers_are_the_quantity_and_zipped_ones_are_one() -> None:
    zipped = [of_numbers("24", "2"), of_numbers("12", "3")]
    reported = (
        "minibatch_size=24,servers=2 has the highest throughput: 48.0 samples/s, 1.33x as fast as minibatch_size=12,"
    )
    assert verdict(groups(zipped)[0])[0].startswith(reported)
    crossed = [of_numbers(size, servers) for size in ("24", "12") for servers in ("2", "4")]
    assert (
        verdict(groups(crossed)[0])[0]
        == "cluster.servers=4 is highest in throughput at every train.minibatch_size of the sweep."
    )


def test_a_value_that_half_of_the_seeds_missed_is_not_first() -> None:
    lines = {"dp": [SweepPoint(1.0, "1", None, is_partial=True)], "gpipe": [SweepPoint(1.0, "1", 7.0)]}
    assert [*Sweep("k", "time_to_accuracy_s", lines).first_places()] == [("gpipe", "1", "1")]
    timed = {**DP.metrics, "time_to_accuracy_s": 5.0}
    seeds = [
        replace(each, outcome=outcome, seed=seed, metrics=timed)
        for each in RESULTS
        for seed, outcome in enumerate((REACHED, MISSED if each.mode == "dp" else REACHED))
    ]
    sweep = sweep_of(groups(seeds)[0])
    assert sweep is not None
    found = {name: {(point.is_partial, point.value) for point in line} for name, line in sweep.lines.items()}
    assert found == {"dp": {(True, None)}, "pipedream": {(False, 5.0)}}


def tried(mode: str, rate: str, *times_s: float | None) -> list[RunResult]:
    """Runs at a learning rate, one per seed; None for one that missed the target."""
    varied = {"train.optimizer.lr": rate, "parallelism.mode": mode}
    recipe = {"name": "q", "train.target.metric": "top1", "train.target.value": "0.9", **varied}
    return [
        replace(
            DP, name=f"q-lr={rate},{mode}", mode=mode, seed=seed, outcome=MISSED if time_s is None else REACHED,
            metrics={} if time_s is None else {"time_to_accuracy_s": time_s, "epoch_time_s": 1.0},
            varied=varied, recipe=recipe,
        )
        for seed, time_s in enumerate(times_s)
    ]  # fmt: skip


RATES_TRIED = [
    *tried("dp", "0.01", 8.0, 9.0), *tried("pipedream", "0.01", 4.0, 4.5),
    *tried("dp", "0.1", None, None), *tried("pipedream", "0.1", None, None),
    *tried("dp", "1", 2.0, 2.5), *tried("pipedream", "1", 1.0, None),
]  # fmt: skip


def test_no_line_is_first_if_none_reached_the_target() -> None:
    """Such a value was left out, and the first line on both sides was called first there, too."""
    (group,) = groups(RATES_TRIED)
    along, first = verdict(group)[:2]
    reported = "pipedream at 0.01, none at 0.1, dp at 1"
    assert along == f"Along train.optimizer.lr, first to the target with most seeds: {reported}."
    assert first.startswith("lr=1,dp is first to top1 0.9 with most seeds: in 2.25 s, 1.89x as fast as"), (
        "a rate is chosen, so the first of all counts"
    )
    (group,) = groups([run for run in RATES_TRIED if run.varied["train.optimizer.lr"] == "0.1"])
    assert verdict(group)[0] == "None reached top1 0.9."
    (group,) = groups([replace(run, outcome=MISSED) for run in RESULTS])
    assert verdict(group)[0] == "None reached the target.", "of a bandwidth, which nobody chooses, too"


def test_a_row_of_a_sweep_is_measured_against_the_dp_run_of_its_own_learning_rate() -> None:
    """Rates are free, so every dp row fits: it was the first one for all, and dp itself was 4 times as fast as dp."""
    (group,) = groups(RATES_TRIED)
    against = {row.name: row.vs_dp for row in group.rows}
    assert against["lr=1,dp"] == against["lr=0.01,dp"] == 1.0
    assert against["lr=0.01,pipedream"] == 2.0
    assert speed_ups(RATES_TRIED)["q-lr=1,pipedream", 0]["speedup_over_dp"] == 2.0


def test_rows_with_different_targets_are_compared_by_their_own() -> None:
    runs = [
        replace(
            run, recipe={**run.recipe, "train.target.value": value}, varied={"train.target.value": value}, name=value
        )
        for value, run in zip(("0.8", "0.9"), tried("dp", "1", 1.0, 2.0), strict=True)
    ]
    assert verdict(groups(runs)[0])[0].startswith("0.8 is first to its own target: in 1.00 s")


def test_a_sweep_over_names_has_no_quantity() -> None:
    named = [replace(each, varied={"parallelism.mode": each.mode}) for each in RESULTS[:2]]
    (group,) = groups(named)
    assert sweep_of(group) is None


@pytest.mark.parametrize("text", ["2-1-1", "dp", "", "10 parsecs"])
def test_texts_that_are_not_quantities(text: str) -> None:
    assert quantity(text) is None


@pytest.mark.usefixtures("rendered")
def test_the_picture_has_a_line_per_mode_and_the_values_as_written(tmp_path: Path) -> None:
    (axes,) = sweep_figure(found_sweep()).axes
    assert {line.get_label() for line in axes.lines} == {*RATES}
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert next(label.get_text() for label in axes.get_xticklabels()) == "1 Gbit/s"
    sweep_figure(found_sweep()).write(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_names_of_many_lines_are_above_them() -> None:
    """Ten names in the midst of the lines covered half of them."""
    few = found_sweep()
    lines = {f"parallelism.mode=dp, train.seed={seed}": next(iter(few.lines.values())) for seed in range(10)}
    figure = sweep_figure(Sweep(few.key, few.metric, lines))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert axes.bbox.y1 <= legend.get_window_extent().y0 < legend.get_window_extent().y1 <= figure.bbox.y1
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_a_picture_of_seeds_shows_spreads_misses_and_gaps() -> None:
    (sweep,) = sweeps_of([*RATES_TRIED, *tried("dp", "10", 3.0, 3.0), *tried("pipedream", "10", 2.0, 1.5, None)])
    (axes,) = sweep_figure(sweep).axes
    drawn = [(line, np.array(line.get_xydata()).tolist()) for line in axes.lines]
    (line,) = [points for line, points in drawn if line.get_label() == "pipedream"]
    assert [math.isnan(time_s) for _, time_s in line] == [False, True, True, False]
    spans = [(points[0][1], points[1][1]) for line, points in drawn if len(points) == 2 and line.get_marker() == "None"]
    assert [each for each in spans if not math.isnan(each[1])] == [(8.0, 9.0), (2.0, 2.5), (4.0, 4.5), (1.5, 2.0)]
    hollow = [points[0] for line, points in drawn if line.get_markerfacecolor() == "white"]
    assert [each for each in hollow if not math.isnan(each[1])] == [[10.0, 2.0]]
    assert axes.get_xlabel() == "train.optimizer.lr (hollow: some seeds missed the target)"


def test_the_picture_has_room_for_every_value_from_zero_on() -> None:
    """A marker at the largest value was cut in half, and the last place, which none reached, stood at the edge."""
    (sweep,) = sweeps_of([run for run in RATES_TRIED if run.varied["train.optimizer.lr"] != "1"])
    (axes,) = sweep_figure(sweep).axes
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert (left < 0.01, right > 0.1, bottom, top > 9.2) == (True, True, 0.0, True)
