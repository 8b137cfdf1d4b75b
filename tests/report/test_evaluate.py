"""Cells and verdicts from results: numbers by hand, seeds that miss their target, plans that differ and why."""

from collections.abc import Callable, Mapping

import pytest

from pipebench.report.definition import Report
from pipebench.report.evaluate import CellOutcome, evaluate_report
from pipebench.report.evaluated import LEFT_OUT, NO, UNTESTABLE, YES, Evaluated, Origin, TableCell
from pipebench.report.load import read_report, with_rows
from pipebench.report.reasons import reason_for_plan
from pipebench.simulate.meter import MEMORY
from pipebench.train.result import COMPLETED, MISSED, REACHED, RunResult
from tests.report.conftest import Write, changed


def result(plan: str = "4", epoch_s: float = 10.0, outcome: str = COMPLETED, **metrics: float) -> RunResult:
    stage = {"forward_s": 0.1, "backward_s": 0.2, "update_s": 0.05, "replicas": 1, "samples_per_update": 32}
    known = {
        "epoch_time_s": epoch_s,
        "throughput_samples_per_s": 64.0,
        "comm_bytes_per_sample": 3e6,
        "comm_bytes_per_sample_all_reduce": 1e6,
        "comm_stall_fraction": 0.25,
        **metrics,
    }
    recipe = {"train.minibatch_size": "32", "parallelism.microbatches": "1"}
    return RunResult(
        "r", "dp", plan, "simulated", "virtual", "a roofline", 0, outcome, "done", known, stages=(stage,), recipe=recipe
    )


def outcome(name: str, found: RunResult | str) -> CellOutcome:
    origin = Origin(name, ("dp.yaml",), "simulated", "a roofline", "", 0)
    return CellOutcome(origin, None, found) if isinstance(found, str) else CellOutcome(origin, found)


def evaluated(report: Report, found: Mapping[tuple[str, str, str], list[RunResult | str]]) -> Evaluated:
    outcomes = {place: [outcome(place[1], each) for each in several] for place, several in found.items()}
    return evaluate_report(report, outcomes)


def cell(of: Evaluated, row: str, measure: str, column: str = "ideal") -> TableCell:
    found = of.cell(row, measure, column)
    assert found is not None
    return found


def one_column(write: Write, **keys: object) -> Report:
    """Return the valid report with its first row and column only."""
    rows = [changed()["rows"][0]]
    whole = changed(rows=rows, columns={"ideal": {}}, calibration=None, pictures=None)
    report, reading = read_report(write({**whole, **keys}))
    assert not reading.faults
    return report


def test_a_cell_is_its_expression_over_the_results(write: Write) -> None:
    found = evaluated(
        one_column(write),
        {("first", "dp", "ideal"): [result()], ("first", "straight", "ideal"): [result("straight", 4.0)]},
    )
    speedup = cell(found, "first", "speedup")
    assert (speedup.value, speedup.low, speedup.high, speedup.problem) == (2.5, None, None, None)
    assert speedup.ratio == pytest.approx(2.5 / 1.5)
    assert cell(found, "first", "twice").value == 5.0
    assert [each.name for each in speedup.origins] == ["dp", "straight"]
    assert speedup.hypothesis == "the size is taken to be that of the text"
    assert [(each.answer, each.reason) for each in found.verdicts] == [
        (YES, "min(speedup) is 2.5 (first)"),
        (UNTESTABLE, "nobody is there"),
    ]


def test_a_column_chosen_by_a_measure_s_results_marks_all_its_cells(write: Write) -> None:
    measures = changed()["measures"]
    measures["twice"]["chosen"] = {"seen": "a rate"}
    report = one_column(write, measures=measures, columns={"ideal": {}, "seen": {}}, claims=[])
    runs: dict[tuple[str, str, str], list[RunResult | str]] = {
        ("first", run, column): [result()] for run in ("dp", "straight") for column in ("ideal", "seen")
    }
    found = evaluated(report, runs)
    seen = {(name, column): cell(found, "first", name, column).chosen for name in ("speedup", "twice")
            for column in ("ideal", "seen")}  # fmt: skip
    assert seen == {key: "a rate" if key == ("twice", "seen") else None for key in seen}


@pytest.fixture
def seeded(write: Write) -> Callable[[str, list[RunResult], list[RunResult]], TableCell]:
    """Return a function that gives the cell of an expression over the seeds of `dp` and `straight`."""
    trained = {name: {"recipe": f"{name}.yaml", "engine": "virtual", "seeds": [0, 1, 2]} for name in ("dp", "straight")}

    def found(value: str, dp: list[RunResult], straight: list[RunResult]) -> TableCell:
        measures = {"epochs": {"title": "epochs", "value": value}}
        report = one_column(write, measures=measures, rows=[{"name": "first", "runs": trained}], claims=[])
        return cell(
            evaluated(report, {("first", "dp", "ideal"): [*dp], ("first", "straight", "ideal"): [*straight]}),
            "first",
            "epochs",
        )

    return found


def seeds(*epochs: float | None) -> list[RunResult]:
    """Return a run per seed; None for one that missed its target."""
    return [
        result(outcome=MISSED) if each is None else result(outcome=REACHED, epochs_to_target=each) for each in epochs
    ]


RATIO = "dp.epochs_to_target / straight.epochs_to_target"


def test_several_seeds_give_every_combination_and_a_miss_takes_infinitely_long(
    seeded: Callable[..., TableCell],
) -> None:
    """The median was of the combinations that reached the target, 2.5: what missed looked faster."""
    found = seeded(RATIO, seeds(2.0, 4.0, 6.0), seeds(1.0, 2.0, None))
    # 2 4 6 over 1, over 2 and over infinity: 0 0 0 1 2 2 3 4 6.
    assert (found.value, found.low, found.high) == (2.0, 1.0, 6.0)
    assert found.remarks == ("6 of 9 combinations of seeds; the others: missed",)
    found = seeded(RATIO, seeds(1.0, 2.0, None), seeds(2.0, 4.0, 6.0))
    assert (found.value, found.low, found.high) == (0.5, 1 / 6, 1.0), "and a slow baseline makes fast"
    # Of the ninth neither was faster: 0 0 | 0.5 1 1 2 | inf inf.
    assert seeded(RATIO, seeds(1.0, 2.0, None), seeds(1.0, 2.0, None)).value == 1.0
    assert seeded("dp.epochs_to_target", seeds(2.0, None, 4.0), seeds()).value == 4.0


def test_a_cell_is_missed_where_half_of_the_seeds_missed(seeded: Callable[..., TableCell]) -> None:
    for value, dp, straight in (
        (RATIO, seeds(2.0, 4.0), seeds(1.0, None)),
        (RATIO, seeds(1.0, None, None), seeds(2.0, 4.0, 6.0)),
        (RATIO, seeds(2.0), seeds(None, None, None)),
        (RATIO, seeds(None), seeds(None)),
        ("dp.epochs_to_target", seeds(2.0, None), seeds()),
    ):
        found = seeded(value, dp, straight)
        assert (found.value, found.problem) == (None, "missed")
    assert seeded("dp.epochs_to_target", seeds(2.0, None), seeds()).remarks[0] == "1 of 2 seeds; the others: missed"


def test_a_run_that_failed_is_a_problem_of_its_cells(write: Write) -> None:
    found = evaluated(
        one_column(write), {("first", "dp", "ideal"): ["it doesn't fit"], ("first", "straight", "ideal"): [result()]}
    )
    assert cell(found, "first", "speedup").problem == "it doesn't fit"
    assert cell(found, "first", "plan").value == "4"
    assert found.verdicts[0].answer == UNTESTABLE
    assert found.verdicts[0].reason == "speedup has no value (first: it doesn't fit)"
    assert found.scores == ()


def test_a_value_that_does_not_fit_in_memory_says_so(write: Write) -> None:
    tight = RunResult(**{**vars(result("straight", 20.0)), "notes": {MEMORY: "out of memory at 1 s"}})
    found = evaluated(
        one_column(write), {("first", "dp", "ideal"): [result()], ("first", "straight", "ideal"): [tight]}
    )
    assert cell(found, "first", "speedup").remarks == ("straight: out of memory at 1 s",)
    assert found.verdicts[0].answer == NO


def test_bytes_that_were_not_sent_have_no_value(write: Write) -> None:
    sums = {"value": "dp.comm_bytes_per_sample_gradient + straight.comm_bytes_level_server"}
    report = one_column(write, measures={"sums": sums, **changed()["measures"]})
    runs: dict[tuple[str, str, str], list[RunResult | str]] = {
        ("first", "dp", "ideal"): [result()],
        ("first", "straight", "ideal"): [result(comm_bytes_level_server=7.0)],
    }
    assert cell(evaluated(report, runs), "first", "sums").value == 7.0


@pytest.mark.parametrize(("chosen", "differs"), [("straight", False), ("Straight", False), ("2-2", True)])
def test_the_reason_for_a_different_plan(write: Write, chosen: str, differs: bool) -> None:
    measures = {**changed()["measures"], "plan": {"plan_of": "dp", "against": "straight"}}
    report = one_column(write, measures=measures)
    runs: dict[tuple[str, str, str], list[RunResult | str]] = {
        ("first", "dp", "ideal"): [result(chosen, 8.0)],
        ("first", "straight", "ideal"): [result("straight", 10.0)],
    }
    reason = cell(evaluated(report, runs), "first", "plan").reason
    assert (reason is not None) == differs


def test_the_reason_is_computed_from_both_results() -> None:
    # 32 samples at 64 a second are 500 ms, of which the one stage computes 0.1 + 0.2 and updates 0.05.
    spent = (
        "500 ms per minibatch, workers compute 70.0% of it, 25.0% of all time is waiting for bytes, "
        "3.00 MB sent per sample, 1.00 MB of it sums of gradients"
    )
    found = reason_for_plan(result("2-2", 8.0), result("straight", 10.0))
    assert found == f"the published straight takes 25.0% more time here. straight: {spent}; 2-2: {spent}"
    assert reason_for_plan(result("2-2", 10.0), result("straight", 8.0)).startswith(
        "the published straight takes 20.0% less time here."
    )
    assert reason_for_plan(result("2-2"), "no room") == "the published plan doesn't run here: no room"


def test_a_text_quotes_its_cells(write: Write) -> None:
    about = "Up to {max(speedup)}, twice that is {max(twice)\n- 0}, nobody knows { median(rate) }."
    rate = {"unit": "samples/s", "value": "dp.samples_per_update / (dp.epoch_time_s - dp.total_time_s)"}
    report = one_column(write, measures={**changed()["measures"], "rate": rate}, about=about)
    same = result(total_time_s=10.0, samples_per_update=32.0)
    found = evaluated(report, {("first", "dp", "ideal"): [same], ("first", "straight", "ideal"): [result(epoch_s=4.0)]})
    assert found.about == "Up to 2.50x, twice that is 5.00x, nobody knows -."


def test_claims_about_left_out_rows_are_left_out(write: Write) -> None:
    claims = [
        {"text": "of all", "holds": "min(speedup) >= 1"},
        {"text": "of one that is there", "holds": 'speedup["first"] >= 1'},
        {"text": "of others", "value": 'max(speedup["m*"])', "published": 2.0, "within": 0.1},
        {"text": "of none", "untestable": "nobody is there"},
    ]
    about, only = "It comes to {max(speedup)}, of the first to {speedup['first']}.", {"only": {"recipe": "dp.yaml"}}
    rows = [*changed()["rows"], {"name": "other", "runs": only}]
    whole = changed(claims=claims, about=about, rows=rows, columns={"ideal": {}}, calibration=None, pictures=None)
    report, reading = read_report(write(whole))
    assert not reading.faults
    runs: dict[tuple[str, str, str], list[RunResult | str]] = {
        ("first", run, "ideal"): [result(epoch_s=seconds)] for run, seconds in (("dp", 4.0), ("straight", 2.0))
    }
    found = evaluated(with_rows(report, ["first"]), runs)
    assert [(each.answer, each.reason) for each in found.verdicts] == [
        (LEFT_OUT, "it is about m8, m16, too"),
        (YES, "speedup['first'] is 2"),
        (LEFT_OUT, "it is about m8, m16, too"),
        (UNTESTABLE, "nobody is there"),
    ]
    assert found.about == "It comes to (rows left out), of the first to 2.00x."


def test_a_value_computed_from_a_fitted_cell_is_not_a_prediction(write: Write) -> None:
    """As a time to accuracy: the epoch time's speed-up, fitted on this row, times that of epochs."""
    rows = changed()["rows"][:1]
    rows[0]["published"]["twice"] = 3
    report, reading = read_report(write(changed(rows=rows, pictures=None, claims=[])))
    assert not reading.faults
    found = evaluated(
        report, {("first", run, column): [result()] for run in ("dp", "straight") for column in ("ideal", "slow")}
    )
    slow, ideal = (cell(found, "first", "twice", column) for column in ("slow", "ideal"))
    assert (slow.fitted, slow.chosen, ideal.chosen) == (False, "a part of it is fitted: epoch time", None)
    fitted = cell(found, "first", "speedup", "slow")
    assert (fitted.fitted, fitted.chosen) == (True, None)


def test_a_claim_names_the_rows_that_have_no_value(write: Write) -> None:
    """They were left out of it in silence: of several ways, one that had missed its target, say."""
    rows = [{"name": name, "runs": {run: f"{run}.yaml" for run in ("dp", "straight")}} for name in ("first", "second")]
    report = one_column(write, rows=rows, claims=[{"text": "Faster", "holds": "min(speedup) > 1", "tolerance": "none"}])
    found: dict[tuple[str, str, str], list[RunResult | str]] = {
        (row, run, "ideal"): [result(epoch_s=seconds)]
        for row in ("first", "second")
        for run, seconds in (("dp", 4.0), ("straight", 2.0))
    }
    (before,) = evaluated(report, found).verdicts
    found["second", "straight", "ideal"] = ["it doesn't fit"]
    (after,) = evaluated(report, found).verdicts
    assert (before.reason, before.answer) == ("min(speedup) is 2 (first)", YES)
    assert (after.reason, after.answer) == ("min(speedup) is 2 (first); without second (it doesn't fit)", YES)


def test_a_text_quotes_the_column_that_it_names(write: Write) -> None:
    about, rows = "{slow: max(twice)} after {ideal: max(twice)}", changed()["rows"][:1]
    report, reading = read_report(write(changed(about=about, rows=rows, pictures=None)))
    assert not reading.faults
    runs: dict[tuple[str, str, str], list[RunResult | str]] = {
        ("first", run, column): [result(epoch_s=seconds)]
        for run, column, seconds in (
            ("dp", "ideal", 6.0),
            ("straight", "ideal", 4.0),
            ("dp", "slow", 8.0),
            ("straight", "slow", 2.0),
        )
    }
    assert evaluated(report, runs).about == "8.00x after 3.00x"


@pytest.mark.parametrize(("published", "answer"), [(2.0, YES), (2.25, NO), (2.75, NO)])
def test_a_claimed_number_holds_within_its_tolerance_and_is_scored(write: Write, published: float, answer: str) -> None:
    claims = [{"text": "Twice as fast", "value": "max(speedup)", "published": published, "within": 0.1}]
    report = one_column(write, claims=claims)
    found = evaluated(
        report, {("first", "dp", "ideal"): [result(epoch_s=5.0)], ("first", "straight", "ideal"): [result(epoch_s=2.5)]}
    )
    (verdict,) = found.verdicts
    assert verdict.answer == answer
    assert verdict.ratio == pytest.approx(2 / published)
    assert verdict.reason == f"2.00x, {2 / published:.2f} of the published"
    assert [score.cells for score in found.scores if not score.measure] == [1]
