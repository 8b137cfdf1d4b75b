"""A report's values as JSON beside its page, for the coverage page and for further computation."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pipebench import typed_json
from pipebench.report.evaluated import Evaluated, TableCell
from pipebench.report.wording import marks

VALUES = "values.json"


@dataclass(frozen=True)
class CellValue:
    """A cell with a value."""

    row: str
    measure: str
    column: str
    value: float | str
    marks: str = ""  # as on the page
    published: float | str | None = None
    bound: str = "exact"


@dataclass(frozen=True)
class ClaimValue:
    """A claim's verdict in a column."""

    text: str
    column: str  # "" for all
    answer: str
    value: float | None = None  # of a claimed number
    published: float | None = None


@dataclass(frozen=True)
class ReportValues:
    """All values of a page."""

    report: str
    made: str
    columns: dict[str, str]  # titles by name
    cells: tuple[CellValue, ...] = ()
    claims: tuple[ClaimValue, ...] = ()


def values_of(evaluated: Evaluated) -> ReportValues:
    """Return the values of an evaluated report."""
    report = evaluated.report
    claims = tuple(
        ClaimValue(each.claim.text, each.column, each.answer, each.value, number.published if number else None)
        for each in evaluated.verdicts
        for number in [each.claim.number]
    )
    cells = tuple(_cell(cell) for cell in evaluated.cells if cell.value is not None)
    return ReportValues(report.name, evaluated.made, {each.name: each.title for each in report.columns}, cells, claims)


def write_values(values: ReportValues) -> bytes:
    """Return values as JSON, a line per cell and claim."""
    lines = {name: value for name, value in asdict(values).items() if name not in ("cells", "claims")}
    parts = [f'"{name}": {json.dumps(value)}' for name, value in lines.items()]
    for name, rows in (("cells", values.cells), ("claims", values.claims)):
        inside = ",\n  ".join(
            json.dumps({key: value for key, value in asdict(row).items() if value is not None}) for row in rows
        )
        parts.append(f'"{name}": [\n  {inside}\n]' if rows else f'"{name}": []')
    return ("{" + ",\n".join(parts) + "}\n").encode()


def read_values(path: Path) -> ReportValues:
    """Return the values in a file; raises an OSError or a UserError."""
    return typed_json.read(ReportValues, path.read_text(encoding="utf-8"), str(path))


def _cell(cell: TableCell) -> CellValue:
    assert cell.value is not None
    published = cell.published
    return CellValue(
        cell.row,
        cell.measure,
        cell.column,
        cell.value,
        marks(cell),
        published.value if published else None,
        published.bound if published else "exact",
    )
