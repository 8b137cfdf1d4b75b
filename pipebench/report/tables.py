"""Tables of published beside reproduced values and plans, and remarks on single cells."""

from collections.abc import Sequence

from pipebench.formats import UNKNOWN
from pipebench.report.definition import Measure, Row
from pipebench.report.evaluated import Evaluated, TableCell
from pipebench.report.origins import links
from pipebench.report.reasons import same_plan
from pipebench.report.wording import (
    CHOSEN,
    CONSTRUCTED,
    FITTED,
    MARKS,
    SUPPOSED,
    compared_text,
    marks,
    plan_class,
    published_text,
    reproduced_text,
    several,
)
from pipebench.show.page import Block, Cell, Heading, LinkedText, RenderedTable, Text

_BETTER = {"higher": ", higher is better", "lower": ", lower is better"}


def tables(evaluated: Evaluated) -> list[Block]:
    """Return a table per published measure, one for all others, and legends."""
    report, grid = evaluated.report, _Grid(evaluated)
    shown = [measure for measure in report.measures if measure.shown]
    compared = [measure for measure in shown if any(measure.published_name in row.published for row in report.rows)]
    own = [measure for measure in shown if measure not in compared]
    blocks = [block for measure in compared if measure.plan_of is None for block in _compared(grid, measure)]
    blocks += _own(grid, own)
    blocks += [block for measure in compared if measure.plan_of is not None for block in _plans(grid, measure)]
    return [*blocks, *_legend(evaluated), *_notes(report.rows)]


class _Grid:
    """The cells of a report by row and measure, and the remarks that are already below earlier tables."""

    def __init__(self, evaluated: Evaluated) -> None:
        self.evaluated, self.rows = evaluated, evaluated.report.rows
        self.columns = evaluated.report.columns
        self.remarked: set[str] = set()

    def cells(self, row: Row, measure: Measure) -> list[TableCell | None]:
        """Return the cells of all columns."""
        return [self.evaluated.cell(row.name, measure.name, column.name) for column in self.columns]

    def rows_of(self, measures: Sequence[Measure]) -> list[Row]:
        """Return the rows with any cell of some measures."""
        return [
            row
            for row in self.rows
            if any(
                (not each.published_as and each.name in row.published) or any(self.cells(row, each))
                for each in measures
            )
        ]


def _compared(grid: _Grid, measure: Measure) -> list[Block]:
    """Return a measure's published and reproduced values and their ratios."""
    rows = grid.rows_of([measure])
    wheres = any(row.where for row in rows)
    headings = [each for column in grid.columns for each in (column.title, "÷ published")]
    lines: list[tuple[Cell, ...]] = [
        (
            row.title,
            *((row.where,) if wheres else ()),
            published_text(row.published.get(measure.published_name), measure),
            *(entry for cell in grid.cells(row, measure) for entry in (_value(cell, measure), compared_text(cell))),
        )
        for row in rows
    ]
    table = RenderedTable(("", *(("where",) if wheres else ()), "published", *headings), lines, left=1 + wheres)
    return [Heading(_heading(measure)), table, *_remarks(grid, [measure])]


def _own(grid: _Grid, measures: Sequence[Measure]) -> list[Block]:
    """Return the rows without a published value, one column per metric."""
    rows = grid.rows_of(measures)
    if not rows:
        return []
    of = {measure.name: grid.evaluated.report.columns_of(measure) for measure in measures}
    places = [(measure, column) for measure in measures for column in of[measure.name]]
    if len(measures) == 1 < len(places):
        headings = [column.title for _, column in places]
    else:
        headings = [
            measure.title if len(of[measure.name]) == 1 else f"{measure.title}, {column.title}"
            for measure, column in places
        ]
    lines: list[tuple[Cell, ...]] = [
        (row.title, *(_value(grid.evaluated.cell(row.name, each.name, column.name), each) for each, column in places))
        for row in rows
    ]
    table = RenderedTable(("", *headings), lines)
    title = _heading(measures[0]) if len(measures) == 1 else "Side by side"
    return [Heading(title), table, *_remarks(grid, measures)]


def _plans(grid: _Grid, measure: Measure) -> list[Block]:
    """Return chosen and published plans by class, and why they differ."""
    rows = grid.rows_of([measure])
    headings = ["", "published", "class"]
    for column in grid.columns:
        headings += [column.title, "class", "agrees in"]
    lines: list[tuple[Cell, ...]] = [
        (
            row.title,
            *_published_plan(row, measure),
            *(entry for cell in grid.cells(row, measure) for entry in _plan(cell, measure)),
        )
        for row in rows
    ]
    table = RenderedTable(headings, lines, left=len(headings))
    return [Heading(_heading(measure)), table, *_agreement(grid, measure, rows), *_remarks(grid, [measure])]


def _published_plan(row: Row, measure: Measure) -> tuple[str, str]:
    text = published_text(row.published.get(measure.published_name), measure)
    return text, UNKNOWN if text == UNKNOWN else plan_class(text)


def _plan(cell: TableCell | None, measure: Measure) -> tuple[LinkedText, str, str]:
    if cell is None or not isinstance(cell.value, str):
        return _value(cell, measure), UNKNOWN, UNKNOWN
    return _value(cell, measure), plan_class(cell.value), _agrees_in(cell) or UNKNOWN


def _agrees_in(cell: TableCell | None) -> str | None:
    """Return how far a plan agrees with the published one: `plan`, `class` or `nothing`; None if either is missing."""
    published = cell.published.value if cell is not None and cell.published is not None else None
    if cell is None or not isinstance(cell.value, str) or not isinstance(published, str):
        return None
    if same_plan(cell.value, published):
        return "plan"
    return "class" if plan_class(cell.value) == plan_class(published) else "nothing"


def _agreement(grid: _Grid, measure: Measure, rows: Sequence[Row]) -> list[Block]:
    """Return how many plans agree with the published ones, a sentence per column."""
    sentences = []
    for column in grid.columns:
        found = [_agrees_in(grid.evaluated.cell(row.name, measure.name, column.name)) for row in rows]
        there = [each for each in found if each is not None]
        if there:
            classes, plans = sum(each != "nothing" for each in there), there.count("plan")
            sentences.append(f"{column.title}: class as published in {classes} of {len(there)} rows, plan in {plans}")
    return [Text(f"{'. '.join(sentences)}.")] if sentences else []


def _heading(measure: Measure) -> str:
    return f"{measure.title[:1].upper()}{measure.title[1:]}{_BETTER.get(measure.better or '', '')}"


def _value(cell: TableCell | None, measure: Measure) -> LinkedText:
    text, mark = reproduced_text(cell, measure), marks(cell)
    return LinkedText(f"{text} {mark}" if mark else text, links(cell.origins if cell is not None else ()))


def _remarks(grid: _Grid, measures: Sequence[Measure]) -> list[Block]:
    """Return a line per remark, with the rows and columns that share it; none that is below an earlier table."""
    columns_of: dict[tuple[str, str], dict[str, None]] = {}
    for row in grid.rows:
        for measure in measures:
            for column in grid.columns:
                for remark in _remarks_on(grid.evaluated.cell(row.name, measure.name, column.name)):
                    columns_of.setdefault((row.title, remark), {})[column.title] = None
    titles: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (title, remark), found in columns_of.items():
        titles.setdefault((remark, tuple(found)), []).append(title)
    lines = []
    for (remark, columns), rows in titles.items():
        where = f" ({' and '.join(columns)})" if len(columns) < len(grid.columns) else ""
        lines.append(f"- {several(rows)}{where}: {remark}")
    new = [line for line in lines if line not in grid.remarked]
    grid.remarked.update(new)
    return [Text("\n".join(new))] if new else []


def _remarks_on(cell: TableCell | None) -> list[str]:
    if cell is None:
        return []
    marked = [
        f"`{mark}` {text}"
        for mark, text in ((CONSTRUCTED, cell.by_construction), (CHOSEN, cell.chosen), (SUPPOSED, cell.hypothesis))
        if text
    ]
    problem = [cell.problem] if cell.problem and ":" in cell.problem else []
    return [*marked, *problem, *cell.remarks, *([cell.reason] if cell.reason else [])]


def _legend(evaluated: Evaluated) -> list[Block]:
    """Return the meaning of the marks in use, and the cells of each fitted constant."""
    report = evaluated.report
    used = {mark for cell in evaluated.cells for mark in marks(cell)}
    lines = [f"- `{mark}` {meaning}" for mark, meaning in MARKS.items() if mark in used]
    if FITTED in used and report.calibration is not None:
        known = {row.name: row.title for row in report.rows}
        for each in report.calibration.constants:
            cells = (f"{known.get(row, row)} ({report.measure(measure).title})" for row, measure in each.fitted_on)
            lines.append(f"- `{each.name}`, {each.key} of {each.cluster}, is fitted on {', '.join(cells)}")
    return [Text("Marks:\n\n" + "\n".join(lines))] if lines else []


def _notes(rows: Sequence[Row]) -> list[Block]:
    lines = [f"- {row.title}: {row.note.strip()}" for row in rows if row.note]
    return [Text("Notes:\n\n" + "\n".join(lines))] if lines else []
