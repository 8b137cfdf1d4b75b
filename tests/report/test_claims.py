"""Claims of shipped reports state their tolerance, and fail for results that differ from today's."""

import ast
import random
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase

import pytest

from pipebench.report.catalog import find_report, report_names, reports_folder
from pipebench.report.definition import PublishedClaim, Report
from pipebench.report.evaluate import verdict
from pipebench.report.evaluated import NO, YES
from pipebench.report.expressions import Cells, Lookup, NoValueError, Value
from pipebench.report.load import read_report
from pipebench.report.values import VALUES, ReportValues, read_values
from reports.studies.coverage import entries
from reports.studies.study_claims import StudyClaim, cells_of, judged

REPORTS = {name: read_report(find_report(name))[0] for name in report_names()}
CLAIMS = [(name, claim) for name, report in REPORTS.items() for claim in report.claims if claim.untestable is None]
STUDIES = [(each.name, claim) for each in entries() for claim in each.answers if isinstance(claim, StudyClaim)]
NEAR = 0.35  # further off is not the number that was claimed
LEAST_FAILURES = 0.05  # of random results


def test_claims_of_both_kinds_exist() -> None:
    assert sum(claim.number is not None for _, claim in CLAIMS) > 20
    assert sum(claim.number is None for _, claim in CLAIMS) > 50


@pytest.mark.parametrize(("name", "claim"), [pytest.param(*each, id=f"{each[0]}: {each[1].text}") for each in CLAIMS])
def test_a_claim_says_its_tolerance_and_can_fail(name: str, claim: PublishedClaim) -> None:
    if claim.number is not None:
        assert 0 < claim.number.within <= NEAR
    else:
        assert claim.tolerance
    answers = [*_at_random(REPORTS[name], claim)]
    assert answers.count(NO) >= LEAST_FAILURES * len(answers)


@pytest.mark.parametrize(
    "name", [name for name in REPORTS if (reports_folder() / f"rendered/{name}/{VALUES}").exists()]
)
def test_a_claim_that_holds_fails_for_other_values_of_a_measure(name: str) -> None:
    """From today's values: a row's cell, or a measure's of all rows, by a factor of a hundred at most, or its sign.

    Twice or half would do for claims of numbers; where one thing is said to be above another, it may be so by more.
    """
    values = read_values(reports_folder() / "rendered" / name / VALUES)
    for claim in REPORTS[name].claims:
        for column in values.columns:
            if any((each.text, each.column, each.answer) == (claim.text, column, YES) for each in values.claims):
                assert NO in _disturbed(values, claim, column), f"{claim.text}, {column}"


@pytest.mark.parametrize(
    ("name", "claim"), [pytest.param(*each, id=f"{each[0]}: {each[1].claim.text}") for each in STUDIES]
)
def test_a_claim_on_a_study_says_its_tolerance_and_other_numbers_change_its_answer(
    name: str, claim: StudyClaim
) -> None:
    page = (reports_folder().parent / claim.page).read_text()
    cells = cells_of(page, claim.section, claim.columns)
    changed = [
        {**cells, column: {
            name: (value or 1) * change if name in rows else value for name, value in cells[column].items()
        }}
        for column in cells
        for rows in (
            {*cells[column]},
            *({row} for row in cells[column]),
            *({*[*cells[column]][k::4]} for k in range(4)),
        )
        for change in (0.0, *(10 ** (step / 10) for step in range(-30, 31)))
    ]  # fmt: skip
    answers = set()
    for each in changed:
        with suppress(NoValueError):  # a division by zero
            answers.add(judged(claim, each)[0].answer)
    assert answers == {YES, NO}
    assert claim.claim.tolerance or (claim.claim.number is not None and 0 < claim.claim.number.within <= NEAR)


def _disturbed(values: ReportValues, claim: PublishedClaim, column: str) -> Iterator[str]:
    cells = {
        (each.measure, each.row): each.value
        for each in values.cells
        if each.column == column and not isinstance(each.value, str)
    }
    places = {place for measure, row in cells for place in ((measure, row), (measure, ""))}
    said = claim.holds or (claim.number.value if claim.number else None)
    read = {each.id for each in ast.walk(said.tree) if isinstance(each, ast.Name)} if said else set()
    for measure, row in sorted(places, key=lambda place: (place[0] not in read, place)):  # of others none decides it
        is_negative = any(value < 0 for place, value in cells.items() if place[0] == measure)
        for change in (0.01, 0.1, 0.5, 0.8, 1.25, 2.0, 10.0, 100.0, *([-1.0] if is_negative else [])):
            changed = {
                place: value * change + (change - 1) * 1e-6 if place[0] == measure and row in ("", place[1]) else value
                for place, value in cells.items()
            }
            yield _answer(claim, changed)


def _at_random(report: Report, claim: PublishedClaim) -> Iterator[str]:
    """Yield a claim's answers for positive cells that know nothing of each other, over two orders of magnitude."""
    chance = random.Random(0)
    usual = {"bytes": 1e10, "count": 10.0}  # of others 1
    cells = {
        (measure.name, row.name): usual.get(measure.unit, 1.0)
        for measure in report.measures
        for row in report.rows
        if measure.expression
    }
    for _ in range(200):
        yield _answer(claim, {place: value * 10 ** chance.uniform(-1.5, 0.5) for place, value in cells.items()})


def _answer(claim: PublishedClaim, cells: dict[tuple[str, str], float]) -> str:
    try:
        return verdict(claim, "", _lookup_in(cells)).answer
    except NoValueError:
        return YES  # no answer is no failure


def _lookup_in(cells: dict[tuple[str, str], float]) -> Lookup:
    def lookup(measure: str, row: str) -> Value:
        if (measure, row) in cells:
            return cells[measure, row]
        found = {name: value for (of, name), value in cells.items() if of == measure}
        return Cells({name: value for name, value in found.items() if not row or fnmatchcase(name, row)})

    return lookup
