"""Published values in `reports/published/`: reports quote them right, and each is answered or has a reason."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipebench.recipe.yaml_file import read_mapping
from pipebench.report.catalog import reports_folder
from pipebench.report.coverage import (
    DERIVED,
    NAME,
    NONE,
    PAGE,
    STATED,
    Pages,
    PublishedEntry,
    cell_of_page,
    entries,
    write_coverage,
)
from pipebench.report.definition import Published

ENTRIES = entries()
TOLD = [(each, answer) for each in ENTRIES for answer in each.answers if isinstance(answer, str)]
OF_TABLES = [(each, answer) for each in ENTRIES for answer in each.answers if not isinstance(answer, str)]
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


@pytest.mark.parametrize("answer", sorted({answer for _, answer in TOLD}))
def test_an_answer_is_there(answer: str) -> None:
    kind, _, rest = answer.partition(" ")
    if kind == PAGE:
        assert (Path(reports_folder().parent) / rest).is_file()
    elif kind != NONE:
        assert PAGES.claims(answer) if kind.endswith(":") else PAGES.cells(answer)


@pytest.mark.parametrize(("entry", "answer"), OF_TABLES, ids=lambda value: getattr(value, "name", None))
def test_a_cell_of_a_study_is_there_beside_what_is_printed(entry: PublishedEntry, answer: Mapping[str, str]) -> None:
    (found,) = PAGES.answers(answer)
    lines = (reports_folder().parent / answer["page"]).read_text().splitlines()
    assert any(line.startswith(f"| {answer['row']} |") and f"| {found.here} |" in line for line in lines)
    numbers = [float(each) for each in re.findall(r"\d+(?:\.\d+)?", answer["published"])]
    known = [float(each) for each in _leaves(entry.values) if isinstance(each, int | float)]
    ratios = [round(a / b, 1) for a, b in itertools.permutations(known, 2) if b]  # Table 4's speed-ups aren't printed
    assert {*numbers} <= {*known, *ratios}, f"{entry.name}: {answer['published']}"
    if found.ratio is not None:
        assert found.ratio == pytest.approx(float(found.here.rstrip("xs%")) / numbers[0])


def test_a_cell_that_no_table_has_is_refused() -> None:
    (answer,) = {answer["page"]: answer for _, answer in OF_TABLES if "planner" in answer["page"]}.values()
    for wrong in ({"row": "vgg-61"}, {"column": "plans"}):
        with pytest.raises(LookupError, match=next(iter(wrong.values()))):
            cell_of_page({**answer, **wrong})


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
    for entry, answer in TOLD:
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
    for entry, answer in TOLD:
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
