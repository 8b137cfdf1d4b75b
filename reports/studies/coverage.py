"""Coverage: every published number and statement with where it is answered, what comes out, and how near it is.

    python -m reports.studies.coverage [FOLDER]    # reports/rendered/coverage/ by default

Published values and the index of answers are in `reports/published/`; what comes out is read from the pages in
`reports/rendered/`, so nothing runs here.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from pipebench.files import replace as replace_file
from pipebench.formats import UNKNOWN, percent
from pipebench.recipe.yaml_file import read_mapping
from pipebench.report.catalog import find_report, report_names, reports_folder
from pipebench.report.definition import Measure, Published, PublishedClaim, Report
from pipebench.report.load import read_report
from pipebench.report.make import made_now
from pipebench.report.render import blocks_markdown
from pipebench.report.scores import geometric_mean_error
from pipebench.report.values import VALUES, CellValue, ReportValues, read_values
from pipebench.report.wording import CHOSEN, CONSTRUCTED, FITTED, number_text, published_text
from pipebench.show.page import Block, Heading, RenderedTable, Text
from reports.studies.study_claims import StudyClaim, cells_of, judge, numbers_in, read_study_claim

NAME = "coverage"  # of the index and the page
COMMAND = "python -m reports.studies.coverage"
NONE, TEST, DERIVED = "none", "test", "derived"
NEAR = 1.2  # a factor, up or down
STATED = ("published", "qualitative")  # kinds of entries that say what comes out
_PIPEDREAM, _OTHERS = ("pipedream_sosp19", "pipedream_arxiv18"), "PipeDream's papers but Table 1"
_ABOUT = """Every number and statement that the papers print (`reports/published/`), and where a report answers it.
Numbers are those of the pages in `reports/rendered/`; a page's last column counts for the verdict. `=` holds by
construction, `*` was fitted on this cell, `^` something was chosen in view of it, `?` rests on a hypothesis. *Derived*
are numbers that an item doesn't print, but that follow from it or stand elsewhere: they don't count."""


@dataclass(frozen=True)
class PublishedEntry:
    """A number or statement of a source, as `reports/published/SOURCE.yaml` has it."""

    source: str  # name of the file
    name: str  # its id
    where: str  # section, table or figure
    claim: str  # in words
    values: Any  # the numbers
    answers: tuple[str | Mapping[str, str] | StudyClaim, ...]  # of the index, with claims on studies parsed


@dataclass(frozen=True)
class EntryAnswer:
    """One answer to an entry: a row of the page."""

    page: str  # Markdown link to the page with the answer
    what: str = ""  # title of the cell or claim; "" for none
    published: str = UNKNOWN  # the published number, as text
    here: str = UNKNOWN  # the reproduced number, as text
    ratio: float | None = None  # reproduced over published
    verdict: str = ""  # in words
    marks: str = ""  # as in reports: how far the cell is a prediction
    place: tuple[str, ...] = ()  # identifies the cell or claim, which scores count once; () if they don't count it


class Pages:
    """The shipped reports and the values of their rendered pages."""

    @cached_property
    def reports(self) -> Mapping[str, Report]:
        """The definitions, by name."""
        return {name: read_report(find_report(name))[0] for name in report_names()}

    @cached_property
    def values(self) -> Mapping[str, ReportValues]:
        """The values, by name, of the reports that are rendered."""
        paths = {name: reports_folder() / "rendered" / name / VALUES for name in self.reports}
        return {name: read_values(path) for name, path in paths.items() if path.is_file()}

    def cells(self, answer: str) -> list[tuple[Report, str, Measure]]:
        """Return report, row and measure of the cells with a published value that match `REPORT ROW.MEASURE`.

        ROW.MEASURE is a pattern of `fnmatch`.
        """
        name, _, pattern = answer.removeprefix(f"{DERIVED} ").partition(" ")
        report = self.reports.get(name)
        if report is None:
            return []
        return [
            (report, row.name, measure)
            for row in report.rows
            for measure in report.measures
            if measure.published_name in row.published and fnmatchcase(f"{row.name}.{measure.name}", pattern)
        ]

    def claims(self, answer: str) -> list[tuple[Report, PublishedClaim]]:
        """Return the claims, with their report, whose text begins as `REPORT: BEGINNING` says."""
        name, _, begins = answer.partition(": ")
        report = self.reports.get(name)
        return [(report, claim) for claim in report.claims if claim.text.startswith(begins)] if report else []

    def answers(self, answer: str | Mapping[str, str] | StudyClaim) -> Iterator[EntryAnswer]:
        """Yield the rows of an answer of the index: one per cell or claim that it names."""
        if isinstance(answer, StudyClaim):
            yield _of_study(answer)
            return
        if not isinstance(answer, str):
            yield from _of_pair(answer)
            return
        kind, _, rest = answer.partition(" ")
        if kind == NONE:
            yield EntryAnswer(UNKNOWN, verdict=f"no cell: {rest}")
        elif kind == TEST:
            path, _, name = rest.partition("::")
            yield EntryAnswer(_page_link(path), here="as published", verdict=f"equal: {name} asserts it")
        elif kind.endswith(":"):
            yield from (self._claim(*found) for found in self.claims(answer))
        else:
            cells = (self._cell(*found) for found in self.cells(answer))
            yield from (_derived(cell) if kind == DERIVED else cell for cell in cells)

    def _claim(self, report: Report, claim: PublishedClaim) -> EntryAnswer:
        values = self.values.get(report.name)
        found = [each for each in values.claims if each.text == claim.text] if values else []
        if not found:
            return EntryAnswer(_link(report), claim.text, verdict="the page isn't made")
        counted = claim.number is not None and claim.holds is None
        place = (report.name, claim.text) if counted else ()
        return _claimed(_link(report), claim, found[-1].answer, found[-1].value, place)

    def _cell(self, report: Report, row: str, measure: Measure) -> EntryAnswer:
        published = report.row(row).published[measure.published_name]
        what, text = f"{report.row(row).title}: {measure.title}", published_text(published, measure)
        values = self.values.get(report.name)
        found = [c for c in (values.cells if values else ()) if (c.row, c.measure) == (row, measure.name)]
        if not found:
            return EntryAnswer(
                _link(report), what, text, verdict="no value: its page says why" if values else "the page isn't made"
            )
        last = found[-1]
        here = last.value if isinstance(last.value, str) else number_text(last.value, measure.unit)
        place = () if measure.published_as or last.bound != "exact" else (report.name, row, measure.name)
        return EntryAnswer(_link(report), what, text, here, _ratio(last), _verdict(last), last.marks, place)


def _derived(cell: EntryAnswer) -> EntryAnswer:
    """Return a cell whose published number the paper's item doesn't print: marked, and not counted in scores."""
    return replace(cell, published=f"derived: {cell.published}", place=())


def _claimed(link: str, claim: PublishedClaim, answer: str, value: float | None, place: tuple[str, ...]) -> EntryAnswer:
    """Return the answer of a claim, whose verdict names the claim's tolerance or why it can't be tested."""
    number = claim.number
    near = f"within {number.within:.0%}" if number is not None and claim.holds is None else claim.tolerance
    why = claim.untestable or re.sub("^none", "no tolerance", near)
    verdict = f"{answer} ({why})" if why else answer
    if number is None or value is None:
        return EntryAnswer(link, claim.text, verdict=verdict)
    published = published_text(Published(number.published), Measure("", "", number.unit))
    here = number_text(value, number.unit)
    return EntryAnswer(link, claim.text, published, here, value / number.published, verdict, place=place)


def _of_pair(answer: Mapping[str, str]) -> Iterator[EntryAnswer]:
    """Yield the numbers of a cell of a study's page beside the published ones, which are in the same order.

    Scores count them unless the index has a reason (`apart`) not to.
    """
    page, row, column = (answer[key] for key in ("page", "row", "column"))
    text = (reports_folder().parent / page).read_text(encoding="utf-8")
    theirs = answer["published"].split(", " if ", " in answer["published"] else " / ")
    parts = column.partition(": ")[2].split(", " if ", " in column else " / ") if len(theirs) > 1 else [column]
    for index, (part, printed) in enumerate(zip(parts, theirs, strict=True)):
        here = cells_of(text, "", {"here": (column, index)})["here"][row]
        unit = re.sub(r"[\d.,\s]", "", printed)
        ratio, apart = here / numbers_in(printed)[0], answer.get("apart", "")
        here_text = f"{here:,.4g}{unit if unit == 'x' else f' {unit}'.rstrip()}"
        name = part if len(theirs) == 1 else f"{column.partition(': ')[0]}, {part}"
        verdict = f"{_nearness(ratio)}; {apart}" if apart else _nearness(ratio)
        place = () if apart else (page, row, name)
        yield EntryAnswer(_page_link(page), f"{row}: {name}", printed, here_text, ratio, verdict, place=place)


def _of_study(claim: StudyClaim) -> EntryAnswer:
    """Return the answer of a claim on a study's page."""
    found, value = judge(claim, reports_folder().parent)
    place = () if claim.apart or claim.is_bound else (claim.page, claim.claim.text)
    answer = _claimed(_page_link(claim.page), claim.claim, found.answer, value, place)
    found_answer = replace(answer, here=found.reason) if value is None else answer
    return replace(found_answer, verdict=f"{found_answer.verdict}; {claim.apart}") if claim.apart else found_answer


def _page_link(page: str) -> str:
    return f"[{page}](../../../{page})"


def entries() -> list[PublishedEntry]:
    """Return all published numbers and statements with their answers; raises a RecipeError for a faulty file."""
    folder, found = reports_folder() / "published", []
    index = read_mapping(folder / f"{NAME}.yaml")
    for source, answers in index.items():
        for entry in read_mapping(folder / f"{source}.yaml")["entries"]:
            name, kind = entry["id"], entry["kind"]
            if kind in STATED or name in answers:
                read = tuple(_read(each, f"{source}.{name}") for each in answers.get(name, ()))
                found.append(PublishedEntry(source, name, str(entry["where"]), entry["claim"], entry["values"], read))
    return found


def _read(answer: Any, key: str) -> Any:
    if not isinstance(answer, dict) or "columns" not in answer:
        return answer
    return read_study_claim(answer, key, f"{NAME}.yaml", reports_folder().parent)


def write_coverage(folder: Path) -> Path:
    """Write the page into a folder and return its path; raises an OSError on failure."""
    blocks: list[Block] = [Text(_ABOUT)]
    pages, counted = Pages(), dict[tuple[str, ...], tuple[str, EntryAnswer]]()
    every = entries()
    for source in dict.fromkeys(entry.source for entry in every):
        rows = []
        for entry in (each for each in every if each.source == source):
            for answer in (found for each in entry.answers for found in pages.answers(each)):
                rows.append(_row(entry, answer))
                if answer.place and answer.ratio is not None and answer.ratio > 0:
                    counted.setdefault(answer.place, (source, answer))
        blocks += [Heading(source), RenderedTable(_HEADINGS, rows, left=3)]
    blocks += _scores([*counted.values()])
    blocks += [Text(f"Made {made_now()}, by `{COMMAND}`.")]
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.md"
    text = f"`{COMMAND}`\n\n# What is published, and what comes out\n\n{blocks_markdown(blocks)}\n"
    replace_file(page, text.encode())
    return page


_HEADINGS = ("item", "where", "what", "published", "here", "ratio", "verdict", "page")


def _row(entry: PublishedEntry, answer: EntryAnswer) -> Sequence[str]:
    ratio = UNKNOWN if answer.ratio is None else f"{answer.ratio:.2f}" if answer.ratio > 0.1 else f"{answer.ratio:.1g}"
    here = f"{answer.here} {answer.marks}".strip()
    what = answer.what or entry.claim
    return entry.name, entry.where, what, answer.published, here, ratio, answer.verdict, answer.page


def _scores(counted: Sequence[tuple[str, EntryAnswer]]) -> list[Block]:
    """Return a table of geometric-mean errors, per source, per page and overall.

    Each over all numbers, over those that don't hold by construction, and over those that nothing was fitted on or
    chosen for either; a set that equals the one before has no row.
    """
    rows = []
    scopes = {scope: None for source, answer in counted for scope in (source, answer.page)}
    others = [(_OTHERS, answer) for source, answer in counted if source in _PIPEDREAM and "[table1]" not in answer.page]
    for scope in [*sorted(scopes, key=lambda each: each.startswith("[")), *([_OTHERS] if others else []), "all"]:
        mine = [answer for source, answer in [*counted, *others] if scope in (source, answer.page)]
        mine = mine or [answer for _, answer in counted]
        free = [answer for answer in mine if CONSTRUCTED not in answer.marks]
        blind = [answer for answer in free if not {FITTED, CHOSEN} & {*answer.marks}]
        before: list[EntryAnswer] = []
        for over, some in (("all", mine), ("not by construction", free), ("nothing fitted or chosen", blind)):
            ratios = [answer.ratio for answer in some if answer.ratio is not None]
            if ratios and some != before:
                near = sum(1 / NEAR <= ratio <= NEAR for ratio in ratios)
                rows.append((scope, over, f"{len(ratios)}", f"{near}", percent(geometric_mean_error(ratios))))
            before = some
    headings = ("source or page", "over", "numbers", "within 20%", "geometric-mean error")
    return [Heading("Scores"), RenderedTable(headings, rows, left=2)]


def _link(report: Report) -> str:
    return f"[{report.name}](../{report.name}/report.md)"


def _ratio(cell: CellValue) -> float | None:
    if isinstance(cell.value, str) or isinstance(cell.published, str) or not cell.published:
        return None
    return cell.value / cell.published


def _verdict(cell: CellValue) -> str:
    ratio, published = _ratio(cell), cell.published
    if ratio is None or isinstance(cell.value, str) or isinstance(published, str) or published is None:
        return "equal" if str(cell.value).lower() == str(published).lower() else "differs"
    if cell.bound in ("exact", "about"):
        return _nearness(ratio)
    holds = cell.value >= published if cell.bound == "at_least" else cell.value <= published
    return "kept" if holds else "not kept"


def _nearness(ratio: float) -> str:
    if 1 / NEAR <= ratio <= NEAR:
        return "within 20%"
    return f"off by {float(f'{max(ratio, 1 / ratio):.2g}'):g}x" if ratio > 0 else "off"


def main() -> None:
    """Write the page and print its path."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else reports_folder() / "rendered" / NAME
    print(write_coverage(folder))


if __name__ == "__main__":
    main()
