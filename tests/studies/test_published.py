"""Published values in `reports/published/`: reports quote them right, and each is answered or has a reason."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from pipebench.recipe.yaml_file import read_mapping
from pipebench.report.catalog import reports_folder
from pipebench.report.definition import Published
from pipebench.report.values import CellValue
from reports.studies import coverage
from reports.studies.coverage import DERIVED, NAME, NONE, STATED, TEST, Pages, PublishedEntry, entries, write_coverage
from reports.studies.study_claims import StudyClaim

ENTRIES = entries()
ANSWERED = [(each, answer) for each in ENTRIES for answer in each.answers if isinstance(answer, str)]
PAIRS = [(each, answer) for each in ENTRIES for answer in each.answers if isinstance(answer, dict)]
OF_STUDIES = [(each, answer) for each in ENTRIES for answer in each.answers if isinstance(answer, StudyClaim)]
PAGES = Pages()
FOLDER = reports_folder() / "published"
SOURCES = ("pipedream_sosp19", "pipedream_arxiv18", "vpipe_tpds21")
# The columns of Tables 1 (PipeDream) and 3 (vPipe) by the measure that is compared with them.
TABLES = {
    "epoch_speedup": "epoch_time_speedup", "auto_speedup": "epoch_time_speedup", "tta_speedup": "tta_speedup",
    "effective": "alu_effective", "total": "alu_total", "memory": "memory", "with_constant": "memory", "pcie": "pcie",
    "forward": "fwd", "backward": "bwd", "batch": "batch",
}  # fmt: skip
# Numbers of stated entries that are settings, not results.
SETTINGS = (
    "t1-*.accuracy_threshold.*", "t1-*.servers", "t1-*.gpus_*", "t1-*.stage_replicas", "t3-*.v100s", "t3-*.batch",
    "s52-lm.lstm_layers", "s52-lm.parameters_gb", "s52-lars.fastest_*", "s52-lars.minibatches_*", "*.machines",
    "s52-asp.accuracy_percent", "s55-depth.depth_range", "intro-*-transformer.batch", "s61-pd-memory.gpu_gb",
    "s63-nas-events-*", "t4-*.original_graph.*",
)  # fmt: skip
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


@pytest.mark.parametrize("answer", sorted({answer for _, answer in ANSWERED}))
def test_an_answer_exists(answer: str) -> None:
    kind, _, rest = answer.partition(" ")
    if kind == TEST:
        path, _, name = rest.partition("::")
        assert f"def {name}(" in (reports_folder().parent / path).read_text()
    elif kind != NONE:
        assert PAGES.claims(answer) if kind.endswith(":") else PAGES.cells(answer)


@pytest.mark.parametrize(("entry", "answer"), PAIRS, ids=lambda value: getattr(value, "name", None))
def test_numbers_of_a_study_s_cell_are_beside_the_published_ones(
    entry: PublishedEntry, answer: Mapping[str, str]
) -> None:
    found = [*PAGES.answers(answer)]
    lines = (reports_folder().parent / answer["page"]).read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {answer['row']} |") and "," in line][:1]
    numbers = [_first_number(text) for text in re.split(", | / ", answer["published"])]
    known = [float(each) for each in _leaves(entry.values) if isinstance(each, int | float)]
    ratios = [round(a / b, 1) for a, b in itertools.permutations(known, 2) if b]  # Table 4's speed-ups aren't printed
    assert {*numbers} <= {*known, *ratios}, f"{entry.name}: {answer['published']}"
    assert len(found) == len(numbers)
    for each, number in zip(found, numbers, strict=True):
        assert re.search(rf"(?<![\d.]){re.escape(each.here.rstrip('x'))}0?(?![\d.]\d)", row), each.here
        assert each.ratio == pytest.approx(_first_number(each.here) / number)
        assert bool(each.place) == ("apart" not in answer)


@pytest.mark.parametrize(("entry", "claim"), OF_STUDIES, ids=lambda value: getattr(value, "name", None))
def test_a_claim_on_a_study_has_an_answer_and_quotes_its_entry(entry: PublishedEntry, claim: StudyClaim) -> None:
    (found,) = PAGES.answers(claim)
    assert found.verdict.startswith(("yes (", "no ("))
    if claim.claim.number is not None:
        of_hundred = [1 + each / 100 for each in _leaves(entry.values) if isinstance(each, int | float)]
        like_stashing = [1.0] if entry.name == "vertical-sync-impact" else []
        known = [each for each in _leaves(entry.values) if isinstance(each, int | float)]
        assert claim.claim.number.published in [*known, *of_hundred, *like_stashing]
        assert found.ratio is not None


def test_every_number_of_an_entry_has_a_row_or_a_reason() -> None:
    """An entry counted as answered by one of its numbers: Table 4's costs and three 1x of Table 1 were nowhere."""
    left_out = []
    for source in SOURCES:
        stated = {each["id"] for each in read_mapping(FOLDER / f"{source}.yaml")["entries"] if each["kind"] in STATED}
        for entry in (each for each in ENTRIES if each.source == source and each.name in stated):
            printed = [*_answered(entry)]
            if entry.answers and not all(_is_whole(each) for each in entry.answers):
                left_out += [
                    (entry.name, key, number)
                    for key, number in _numbers(entry.values)
                    if not any(fnmatchcase(f"{entry.name}.{key}", pattern) for pattern in SETTINGS)
                    and not any(_is_among(Published(each), [number]) for each in printed)
                ]
    assert left_out == []


def test_each_speed_up_of_table_1_has_a_separate_cell_or_a_reason() -> None:
    """The 1x of an epoch isn't that of the time to accuracy."""
    for entry in (each for each in ENTRIES if each.name.startswith("t1-")):
        cells = {measure.name for answer in entry.answers for *_, measure in PAGES.cells(str(answer))}
        reasons = " ".join(str(each) for each in entry.answers if str(each).startswith(NONE))
        for measure, words in (("epoch_speedup", "epoch time"), ("tta_speedup", "time to accuracy")):
            answered = measure in cells or words in reasons
            assert answered == (entry.values[TABLES[measure]] is not None), (entry.name, measure)


def test_values_that_an_item_does_not_print_are_derived_and_do_not_count() -> None:
    (found, *_) = PAGES.answers("derived vpipe_figure9 bert-gpipe-vpipe.improvement")
    assert (found.published, found.place) == ("derived: 1.31x", ())


def _is_whole(answer: Any) -> bool:
    """Return whether an answer stands for all of an entry: a test, or a reason that names no number."""
    kind, _, rest = str(answer).partition(" ")
    return isinstance(answer, str) and (kind == TEST or (kind == NONE and not re.search(r"\d", rest)))


def _answered(entry: PublishedEntry) -> Iterator[float]:
    """Yield the numbers that an entry's answers quote, those of claims' texts and of reasons included."""
    for answer in entry.answers:
        texts = []
        if isinstance(answer, StudyClaim):
            texts, claims = [answer.claim.text], [answer.claim]
        elif not isinstance(answer, str):
            texts, claims = [answer["published"]], []
        else:
            kind = answer.partition(" ")[0]
            claims = [claim for _, claim in PAGES.claims(answer)] if kind.endswith(":") else []
            texts = [answer] if kind == NONE else [claim.text for claim in claims]
            for report, row, measure in () if kind in (NONE, TEST) or kind.endswith(":") else PAGES.cells(answer):
                value = report.row(row).published[measure.published_name].value
                yield from [value] if isinstance(value, int | float) else _stated(str(value))
        yield from (claim.number.published for claim in claims if claim.number is not None)
        yield from (number for text in texts for number in _stated(text))


def _stated(text: str) -> Iterator[float]:
    yield from (float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", text))


def _numbers(values: Any, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(values, dict | list):
        for name, each in values.items() if isinstance(values, dict) else [("", each) for each in values]:
            yield from _numbers(each, ".".join(filter(None, (key, str(name)))))
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield key, float(values)


def test_every_exact_published_cell_belongs_to_an_entry() -> None:
    named = {(report.name, row, measure.name) for _, report, row, measure in _quoted(derived=True)}
    for report in PAGES.reports.values():
        for row in report.rows:
            for measure, published in row.published.items():
                if published.bound == "exact" and report.name not in NOT_QUOTED:
                    assert (report.name, row.name, measure) in named


def test_cells_quote_their_entry() -> None:
    for entry, report, row, measure in _quoted():
        published = report.row(row).published[measure.published_name]
        same = published.bound == "about" or _is_among(published, entry.values)
        assert same, f"{entry.name}: {report.name} {row} {measure.name}, {published}"


def test_cells_of_the_tables_quote_their_column() -> None:
    """A row of Tables 1 and 3 has several numbers, which `test_cells_quote_their_entry` doesn't tell apart."""
    found = [
        (entry.name, report.row(row).published[measure.published_name], entry.values[TABLES[measure.name]])
        for entry, report, row, measure in _quoted()
        if measure.name in TABLES and TABLES[measure.name] in entry.values and entry.name.startswith(("t1-", "t3-"))
    ]
    assert len(found) > 140
    assert [each for each in found if not _is_among(each[1], [each[2]])] == []


def test_numbers_of_claims_equal_their_entry_s() -> None:
    for entry, answer in ANSWERED:
        for _, claim in PAGES.claims(answer) if answer.partition(" ")[0].endswith(":") else ():
            if claim.number is not None:
                assert _is_among(Published(claim.number.published), entry.values), f"{entry.name}: {claim.text}"


def test_the_page_has_a_row_per_answer_and_scores(tmp_path: Path) -> None:
    page = write_coverage(tmp_path / "coverage").read_text()
    for entry in ENTRIES:
        assert f"| {entry.name} |" in page
    assert "## Scores" in page


def _quoted(*, derived: bool = False) -> Iterator[tuple[Any, Any, str, Any]]:
    for entry, answer in ANSWERED:
        kind = answer.partition(" ")[0]
        if kind not in (NONE, TEST) and (derived or kind != DERIVED) and not kind.endswith(":"):
            yield from ((entry, *cell) for cell in PAGES.cells(answer))


def _first_number(text: str) -> float:
    return float(re.findall(r"\d[\d,]*(?:\.\d+)?", text)[0].replace(",", ""))


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


@pytest.mark.parametrize(("value", "bound", "text"), [(2.0, "at_least", "kept"), (2.0, "at_most", "kept"),
    (1.9, "at_least", "not kept"), (2.1, "at_most", "not kept"), (1.9, "at_most", "kept")])  # fmt: skip
def test_a_bound_that_is_reached_exactly_is_met(value: float, bound: str, text: str) -> None:
    """One from above wasn't, though the report's own page said so."""
    assert coverage._verdict(CellValue("row", "measure", "column", value, published=2.0, bound=bound)) == text
