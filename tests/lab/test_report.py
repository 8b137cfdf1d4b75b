"""The report of given findings: measured and predicted values side by side."""

from dataclasses import replace
from pathlib import Path

from pipebench.train.result import COMPLETED, RunResult
from tests.lab.findings import Case, Findings, LinkFinding, Options, Passed, Run, Wire, label
from tests.lab.ladder import rungs
from tests.lab.picture import figure
from tests.lab.predicting import LabSchedule, Predicted
from tests.lab.report import markdown

PIPELINE = Case("pipe", Path("pipe.yaml"), (), "pipedream")
WHOLE = Case("whole", Path("whole.yaml"), (), "dp")
BANDWIDTHS = (1.25e7, 1.25e8)
WHERE = 5e7
PASSED = Passed(wire_bytes=1_100_000, num_pieces=1000, payload_bytes=1_000_000)


def predicted(case: Case, bandwidth: float) -> Predicted:
    """The pipeline's throughput doesn't depend on the wires; the other's does, and is the same at 400 Mbit."""
    throughput = 100.0 if case is PIPELINE else 100 * bandwidth / WHERE
    return Predicted("1-1" if case is PIPELINE else "2", 2 if case is PIPELINE else 1, throughput, 10.0, 8.0)


def run(case: Case, bandwidth: float, factor: float) -> Run:
    """A run that is `factor` as fast as predicted."""
    wanted = predicted(case, bandwidth)
    metrics = {"throughput_samples_per_s": factor * wanted.throughput_samples_per_s, "time_to_accuracy_s": 22.0}
    result = RunResult("name", case.mode, wanted.plan, "distributed", "wall", "", 0, COMPLETED, "", metrics)
    return Run(case, bandwidth, wanted, 20.0, result, PASSED)


def findings(factor: float) -> Findings:
    """The data-parallel runs are `factor` as fast as predicted, the pipelines exactly as fast."""
    ladder = tuple(rungs(WHERE))
    factors = {PIPELINE: 1.0, WHOLE: factor}
    return Findings(
        options=Options(2, 1, BANDWIDTHS, True, Path("out")),
        cases=(PIPELINE, WHOLE),
        free=Wire(None, 2e9, 4e-6),
        wires=(Wire(1.25e7, 1.19e7, 1e-5),),
        curves={case.name: [(each, predicted(case, each)) for each in BANDWIDTHS] for case in (PIPELINE, WHOLE)},
        runs=tuple(run(case, each, factors[case]) for each in BANDWIDTHS for case in (PIPELINE, WHOLE)),
        crossing=LinkFinding("pipe", "whole", WHERE, ladder),
        climbed=tuple(run(case, each, factors[case]) for each in ladder for case in (PIPELINE, WHOLE)),
    )


def test_every_run_is_beside_its_prediction() -> None:
    page = markdown(findings(0.9))
    assert "| 100Mbit | whole | 2 | 22.5 | 25.0 | -10.0% | 22.0 s | 20.0 s | +10.0% |" in page
    assert "Throughput is 5.0% off on average (mean of absolute errors), and 10.0% at most." in page
    assert "| 100Mbit | 95.2 Mbit | 95.2% | 20.0 us |" in page


def test_the_crossover_is_reported_with_its_distance_from_the_prediction() -> None:
    where = "`pipe` and `whole` are equally fast at 400Mbit."
    assert f"{where} Measured: between 327Mbit and 490Mbit, the predicted step." in markdown(findings(1.0))
    assert f"{where} Measured: between 490Mbit and 735Mbit, 1 step from the predicted one." in markdown(findings(0.7))
    assert f"{where} Measured: nowhere on this ladder." in markdown(findings(0.1))


def test_without_a_ladder_or_a_crossing_the_report_says_so() -> None:
    found = replace(findings(1.0), crossing=None, climbed=())
    assert "None is predicted between 1 Mbit/s and 100 Gbit/s." in markdown(found)
    assert "crossover" not in markdown(replace(found, options=replace(found.options, climbs=False)))


def test_bytes_are_payload_headers_and_the_rest() -> None:
    assert PASSED.header_bytes + PASSED.payload_bytes + PASSED.other_bytes == PASSED.wire_bytes
    assert "| 100Mbit | pipe | 1.00 MB | 1.10 MB | 66.0 kB | 34.0 kB | 10.0% |" in markdown(findings(1.0))


def test_the_picture_has_a_line_and_points_for_every_recipe() -> None:
    made = figure(findings(1.0))
    throughput, time_to_accuracy = made.axes
    assert len(throughput.lines) == 2 * 2 + 1  # and the predicted crossing
    assert len(time_to_accuracy.lines) == 2 * 2
    assert (time_to_accuracy.get_yscale(), time_to_accuracy.get_ylim()[0]) == ("linear", 0.0), "10 s looked like none"
    (legend,) = made.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["pipe", "whole"]
    assert legend.get_texts()[2].get_text().startswith("predicted crossing"), "the dotted line had no name"
    made.draw_without_rendering()
    assert legend.get_window_extent().y0 >= throughput.bbox.y1, "its markers looked like measurements"


def test_a_target_that_is_not_reached_predicts_no_time() -> None:
    epoch = predicted(PIPELINE, 1.25e7)
    assert LabSchedule(None, 1.0).time_to_accuracy_s(epoch) is None
    assert LabSchedule(3.0, 1.5).time_to_accuracy_s(epoch) == 31.5


def test_labels_are_in_the_command_line_s_notation() -> None:
    assert [label(each / 8) for each in (1e6, 1.5e9, 1e10, 256e3)] == ["1Mbit", "1.5Gbit", "10Gbit", "256kbit"]
