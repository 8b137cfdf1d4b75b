"""Coverage: every published number and statement with where it is answered, what comes out, and how near it is.

Published values and the index of answers are in `reports/published/`; what comes out is read from the pages that
`pipebench report` has made, so nothing runs here.
"""

import re
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
from pipebench.report.definition import Measure, Published, Report
from pipebench.report.load import read_report
from pipebench.report.markdown import blocks_markdown
from pipebench.report.scores import geometric_mean_error
from pipebench.report.values import VALUES, CellValue, ReportValues, read_values
from pipebench.report.wording import CHOSEN, CONSTRUCTED, FITTED, number_text, published_text
from pipebench.show.page import Block, Heading, PageEntry, RenderedTable, Text

NAME = "coverage"  # of the index and the page
NONE, PAGE, DERIVED = "none", "page", "derived"
NEAR = 1.2  # a factor, up or down
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?(?:x|s|%)?")  # of a cell of a study
STATED = ("published", "qualitative")  # kinds of entries that say what comes out
_PIPEDREAM, _OTHERS = ("pipedream_sosp19", "pipedream_arxiv18"), "PipeDream's papers but Table 1"
_ABOUT = """Every number and statement that the papers print (`reports/published/`), and where a report answers it.
Numbers are those of the pages in `reports/rendered/`; a page's last column counts for the verdict. `=` holds by
construction, `*` was fitted on this cell, `^` something was chosen in view of it, `?` rests on a hypothesis."""


@dataclass(frozen=True)
class PublishedEntry:
    """A number or statement of a source."""

    source: str  # of the file
    name: str
    where: str
    claim: str
    values: Any
    answers: tuple[str | Mapping[str, str], ...]  # as in the index


@dataclass(frozen=True)
class Answer:
    """One answer to an entry."""

    page: str  # Markdown
    what: str = ""  # cell or claim; "" for none
    published: str = UNKNOWN
    here: str = UNKNOWN
    ratio: float | None = None
    verdict: str = ""
    marks: str = ""
    place: tuple[str, ...] = ()  # of a cell or claim, to count it once; () for one that doesn't count


class Pages:
    """The shipped reports and what their pages say."""

    @cached_property
    def reports(self) -> Mapping[str, Report]:
        """The definitions, by name."""
        return {name: read_report(find_report(name))[0] for name in report_names()}

    @cached_property
    def values(self) -> Mapping[str, ReportValues]:
        """What came out, of those whose page has been made."""
        paths = {name: reports_folder() / "rendered" / name / VALUES for name in self.reports}
        return {name: read_values(path) for name, path in paths.items() if path.is_file()}

    def cells(self, answer: str) -> list[tuple[Report, str, Measure]]:
        """Return the report, row and measure of every cell with a published value that `REPORT ROW.MEASURE` names."""
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

    def claims(self, answer: str) -> list[tuple[Report, str]]:
        """Return the report and text of every claim that `REPORT: BEGINNING` names."""
        name, _, begins = answer.partition(": ")
        report = self.reports.get(name)
        return [(report, claim.text) for claim in report.claims if claim.text.startswith(begins)] if report else []

    def answers(self, answer: str | Mapping[str, str]) -> Iterator[Answer]:
        """Yield what an answer of the index stands for."""
        if not isinstance(answer, str):
            yield _of_table(answer)
            return
        kind, _, rest = answer.partition(" ")
        if kind in (NONE, PAGE):
            linked = f"[{rest}](../../../{rest})"
            yield Answer(UNKNOWN, verdict=f"no cell: {rest}") if kind == NONE else Answer(linked, verdict="see there")
        elif kind.endswith(":"):
            yield from (self._claim(*found) for found in self.claims(answer))
        else:
            cells = (self._cell(*found) for found in self.cells(answer))
            yield from (replace(cell, place=()) if kind == DERIVED else cell for cell in cells)

    def _claim(self, report: Report, text: str) -> Answer:
        values = self.values.get(report.name)
        found = [each for each in values.claims if each.text == text] if values else []
        if not found:
            return Answer(_link(report), text, verdict="the page isn't made")
        last = found[-1]
        number_of = next((claim.number for claim in report.claims if claim.text == text), None)
        if number_of is None or last.value is None:
            return Answer(_link(report), text, verdict=last.answer)
        ratio = last.value / number_of.published
        return Answer(
            _link(report),
            text,
            published=published_text(Published(number_of.published), Measure("", "", number_of.unit)),
            here=number_text(last.value, number_of.unit),
            ratio=ratio,
            verdict=last.answer,
            place=(report.name, text),
        )

    def _cell(self, report: Report, row: str, measure: Measure) -> Answer:
        published = report.row(row).published[measure.published_name]
        what, text = f"{report.row(row).title}: {measure.title}", published_text(published, measure)
        values = self.values.get(report.name)
        found = [c for c in (values.cells if values else ()) if (c.row, c.measure) == (row, measure.name)]
        if not found:
            return Answer(_link(report), what, text, verdict="no value" if values else "the page isn't made")
        last = found[-1]
        here = last.value if isinstance(last.value, str) else number_text(last.value, measure.unit)
        place = () if measure.published_as else (report.name, row, measure.name)
        return Answer(_link(report), what, text, here, _ratio(last), _verdict(last), last.marks, place)


def cell_of_page(answer: Mapping[str, str]) -> str:
    """Return the text of the cell of a study's Markdown tables that has a row and a column.

    Args:
        answer: `page`, the study's path in the repository; `row`, a row's first cell; `column`, a heading. Of several
            such cells, the first.

    Raises:
        LookupError: there is none.
    """
    lines = (reports_folder().parent / answer["page"]).read_text(encoding="utf-8").splitlines()
    column: int | None = None
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            column = None
        elif column is None:
            column = cells.index(answer["column"]) if answer["column"] in cells else -1
        elif column >= 0 and cells[0] == answer["row"]:
            return cells[column]
    raise LookupError(f"{answer['page']} has no row {answer['row']!r} with a column {answer['column']!r}")


def _of_table(answer: Mapping[str, str]) -> Answer:
    """Return a cell of a study's page beside the published text; their ratio counts if both are a number and a unit."""
    page, row, column, published = (answer[key] for key in ("page", "row", "column", "published"))
    here = cell_of_page(answer)
    ours, theirs = (_QUANTITY.fullmatch(text) for text in (here, published))
    what, link = f"{row}: {column}", f"[{page}](../../../{page})"
    if ours is None or theirs is None:
        return Answer(link, what, published, here, verdict="see there")
    ratio = float(ours[1]) / float(theirs[1])
    return Answer(link, what, published, here, ratio, _nearness(ratio), place=(page, row, column))


def entries() -> list[PublishedEntry]:
    """Return every published number and statement with its answers; raises a RecipeError for a faulty file."""
    folder, found = reports_folder() / "published", []
    index = read_mapping(folder / f"{NAME}.yaml")
    for source, answers in index.items():
        for entry in read_mapping(folder / f"{source}.yaml")["entries"]:
            name, kind = entry["id"], entry["kind"]
            if kind in STATED or name in answers:
                told = tuple(answers.get(name, ()))
                found.append(PublishedEntry(source, name, str(entry["where"]), entry["claim"], entry["values"], told))
    return found


def write_coverage(folder: Path) -> Path:
    """Write the page into a folder and return its path; raises an OSError on failure."""
    blocks: list[Block] = [Text(_ABOUT)]
    pages, counted = Pages(), dict[tuple[str, ...], tuple[str, Answer]]()
    told = entries()
    for source in dict.fromkeys(entry.source for entry in told):
        rows = []
        for entry in (each for each in told if each.source == source):
            for answer in (found for each in entry.answers for found in pages.answers(each)):
                rows.append(_row(entry, answer))
                if answer.place and answer.ratio is not None and answer.ratio > 0:
                    counted.setdefault(answer.place, (source, answer))
        blocks += [Heading(source), RenderedTable(_HEADINGS, tuple(rows), left=3)]
    blocks += _scores([*counted.values()])
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.md"
    text = f"`pipebench report {NAME}`\n\n# What is published, and what comes out\n\n{blocks_markdown(blocks)}\n"
    replace_file(page, text.encode())
    return page


_HEADINGS = ("item", "where", "what", "published", "here", "ratio", "verdict", "page")


def _row(entry: PublishedEntry, answer: Answer) -> tuple[PageEntry, ...]:
    ratio = UNKNOWN if answer.ratio is None else f"{answer.ratio:.2f}"
    here = f"{answer.here} {answer.marks}".strip()
    texts = (
        entry.name,
        entry.where,
        answer.what or entry.claim,
        answer.published,
        here,
        ratio,
        answer.verdict,
        answer.page,
    )
    return tuple(PageEntry(text) for text in texts)


def _scores(counted: Sequence[tuple[str, Answer]]) -> list[Block]:
    """Return the geometric-mean errors of all numbers, and of those that nothing forced, per source and per page."""
    rows = []
    scopes = {scope: None for source, answer in counted for scope in (source, answer.page)}
    others = [(_OTHERS, answer) for source, answer in counted if source in _PIPEDREAM and "[table1]" not in answer.page]
    for scope in [*sorted(scopes, key=lambda each: each.startswith("[")), *([_OTHERS] if others else []), "all"]:
        mine = [answer for source, answer in [*counted, *others] if scope in (source, answer.page)]
        mine = mine or [answer for _, answer in counted]
        free = [answer for answer in mine if CONSTRUCTED not in answer.marks]
        blind = [answer for answer in free if not {FITTED, CHOSEN} & {*answer.marks}]
        before: list[Answer] = []
        for over, some in (("all", mine), ("not by construction", free), ("nothing fitted or chosen", blind)):
            ratios = [answer.ratio for answer in some if answer.ratio is not None]
            if ratios and some != before:
                near = sum(1 / NEAR <= ratio <= NEAR for ratio in ratios)
                told = (scope, over, f"{len(ratios)}", f"{near}", percent(geometric_mean_error(ratios)))
                rows.append(tuple(PageEntry(text) for text in told))
            before = some
    headings = ("source or page", "over", "numbers", "within 20%", "geometric-mean error")
    return [Heading("Scores"), RenderedTable(headings, tuple(rows), left=2)]


def _link(report: Report) -> str:
    return f"[{report.name}](../{report.name}/report.md)"


def _ratio(cell: CellValue) -> float | None:
    if cell.bound != "exact" or isinstance(cell.value, str) or isinstance(cell.published, str) or not cell.published:
        return None
    return cell.value / cell.published


def _verdict(cell: CellValue) -> str:
    ratio, published = _ratio(cell), cell.published
    if ratio is not None:
        return _nearness(ratio)
    if isinstance(cell.value, str) or isinstance(published, str) or published is None or cell.bound == "about":
        return "" if cell.value != published else "equal"
    return "kept" if (cell.value >= published) == (cell.bound == "at_least") else "not kept"


def _nearness(ratio: float) -> str:
    if 1 / NEAR <= ratio <= NEAR:
        return "within 20%"
    return f"off by {max(ratio, 1 / ratio):.2g}x" if ratio > 0 else "off"
