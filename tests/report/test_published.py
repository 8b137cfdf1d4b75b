"""Published values in `reports/published/`: reports quote them right, and each is answered or has a reason."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipebench.recipe.yaml_file import read_mapping
from pipebench.report.catalog import reports_folder
from pipebench.report.coverage import DERIVED, NAME, NONE, PAGE, STATED, Pages, entries, write_coverage
from pipebench.report.definition import Published

ENTRIES = entries()
PAGES = Pages()
FOLDER = reports_folder() / "published"
SOURCES = ("pipedream_sosp19", "pipedream_arxiv18", "vpipe_tpds21")
# Whose published values are formulas' or repeat another page's.
NOT_QUOTED = ("theory", "figure10_11")


def test_every_number_and_statement_is_answered_or_left_out_with_a_reason() -> None:
    index = read_mapping(FOLDER / f"{NAME}.yaml")
    for source in SOURCES:
        stated = {each["id"] for each in read_mapping(FOLDER / f"{source}.yaml")["entries"] if each["kind"] in STATED}
        assert stated - {*index[source]} == set()
    assert not [each.name for each in ENTRIES if not each.answers]
    for source, answers in index.items():
        assert {*answers} <= {each["id"] for each in read_mapping(FOLDER / f"{source}.yaml")["entries"]}


@pytest.mark.parametrize("answer", sorted({answer for each in ENTRIES for answer in each.answers}))
def test_an_answer_is_there(answer: str) -> None:
    kind, _, rest = answer.partition(" ")
    if kind == PAGE:
        assert (Path(reports_folder().parent) / rest).is_file()
    elif kind != NONE:
        assert PAGES.claims(answer) if kind.endswith(":") else PAGES.cells(answer)


def test_every_exact_published_cell_is_some_entry_s() -> None:
    named = {(report.name, row, measure.name) for _, report, row, measure in _quoted(derived=True)}
    for report in PAGES.reports.values():
        for row in report.rows:
            for measure, published in row.published.items():
                if published.bound == "exact" and report.name not in NOT_QUOTED:
                    assert (report.name, row.name, measure) in named


def test_cells_quote_what_their_entry_has() -> None:
    for entry, report, row, measure in _quoted():
        published = report.row(row).published[measure.published_name]
        same = published.bound == "about" or _is_among(published, entry.values)
        assert same, f"{entry.name}: {report.name} {row} {measure.name}, {published}"


def test_numbers_of_claims_are_their_entry_s() -> None:
    for entry in ENTRIES:
        for answer in entry.answers:
            for report, text in PAGES.claims(answer) if answer.partition(" ")[0].endswith(":") else ():
                number = next(claim.number for claim in report.claims if claim.text == text)
                if number is not None:
                    assert _is_among(Published(number.published), entry.values), f"{entry.name}: {text}"


def test_the_page_has_a_row_per_answer_and_scores(tmp_path: Path) -> None:
    page = write_coverage(tmp_path / "coverage").read_text()
    for entry in ENTRIES:
        assert f"| {entry.name} |" in page
    assert "## Scores" in page


def _quoted(*, derived: bool = False) -> Iterator[tuple[Any, Any, str, Any]]:
    for entry in ENTRIES:
        for answer in entry.answers:
            kind = answer.partition(" ")[0]
            if kind not in (NONE, PAGE) and (derived or kind != DERIVED) and not kind.endswith(":"):
                yield from ((entry, *cell) for cell in PAGES.cells(answer))


def _is_among(published: Published, values: Any) -> bool:
    """Return whether a value is one of an entry's numbers or texts: in per cent, as a gain, or in MB or GB."""
    found = [*_leaves(values)]
    if isinstance(published.value, str):
        return published.value.lower() in [str(each).lower() for each in found]
    numbers = [float(each) for each in found if isinstance(each, int | float) and not isinstance(each, bool)]
    return any(
        math.isclose(published.value, form, rel_tol=1e-6)
        for each in numbers
        for form in (each, each / 100, 1 + each / 100, each * 1e6, each * 1e9)
    )


def _leaves(values: Any) -> Iterator[Any]:
    inside = values.values() if isinstance(values, dict) else values if isinstance(values, list) else None
    if inside is None:
        yield values
    else:
        for each in inside:
            yield from _leaves(each)
