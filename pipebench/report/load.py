"""Load a report from YAML; all its faults are raised together, before anything runs."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from pipebench.errors import Fault, RecipeError, UserError, nearest
from pipebench.recipe.catalog import display
from pipebench.recipe.yaml_file import read_mapping
from pipebench.report.definition import Report
from pipebench.report.read_claims import read_calibration, read_claims, read_pictures, read_text
from pipebench.report.read_table import check_metrics, read_table
from pipebench.report.reading import Reading
from pipebench.report.recipes import ReportRun, report_runs

_TOP = ("title", "source", "about", "columns", "measures", "runs", "rows", "claims", "pictures", "calibration")

# Keys whose faults make rows incomplete or missing.
_HIDES_ROWS = re.compile(r"rows(\.\d+(\.(name|for|at)(\..+)?)?)?|(rows\..+\.)?runs")


def load_report(path: Path, only: Sequence[str] = (), engine: str | None = None) -> tuple[Report, list[ReportRun]]:
    """Load and validate a report and the recipes of all its runs.

    Args:
        path: the report's file.
        only: names of rows, or patterns; without any, all rows.
        engine: replaces that of every run that may differ between columns.

    Raises:
        RecipeError: with all faults.
        UserError: a pattern matches no row.
    """
    report, reading = read_report(path)
    report = with_rows(report, only)
    if engine is not None:
        report = _on_engine(report, engine)
        check_metrics(report.measures, report.rows, reading)
    asked, faults = report_runs(report, whole=not only)
    if reading.faults or faults:
        raise RecipeError(dict.fromkeys([*reading.faults, *faults]))
    return report, asked


def with_rows(report: Report, only: Sequence[str]) -> Report:
    """Return a report of the rows that match a pattern, all if empty; raises a UserError if none do."""
    names = [row.name for row in report.rows]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"--only: got {pattern[:60]!r}, allowed are {', '.join(names)}, or patterns"
                f"{nearest(pattern[:60], names)}"
            )
    rows = tuple(row for row in report.rows if not only or any(fnmatchcase(row.name, pattern) for pattern in only))
    known = {"", *(row.name for row in rows)}
    pictures = tuple(picture for picture in report.pictures if picture.row in known)
    return replace(
        report, rows=rows, left_out=tuple(row for row in report.rows if row.name not in known), pictures=pictures
    )


def _on_engine(report: Report, engine: str) -> Report:
    """Return a report whose runs use this engine, except those that are the same in all columns."""
    rows = [
        replace(row, runs={name: run if run.same else replace(run, engine=engine) for name, run in row.runs.items()})
        for row in report.rows
    ]
    return replace(report, rows=tuple(rows))


def read_report(path: Path) -> tuple[Report, Reading]:
    """Read a report's file without loading its recipes; return the valid parts and the faults.

    Raises:
        RecipeError: the file isn't a mapping.
    """
    reading, content = Reading(display(path)), read_mapping(path)
    if {"model", "parallelism"} <= content.keys():
        raise RecipeError([Fault(reading.file, "", f"is a recipe, not a report: `pipebench run {display(path)}`")])
    data = reading.mapping(content, "", _TOP)
    table = read_table(data, reading)
    source = reading.mapping(data.get("source"), "source", ("paper", "where"))
    # If rows are missing, names of rows can't be checked: such faults are dropped.
    about_rows = Reading(reading.file) if any(_HIDES_ROWS.fullmatch(each.key) for each in reading.faults) else reading
    report = Report(
        name=path.stem,
        path=path,
        title=reading.plain(data, "", "title", str),
        columns=table.columns,
        measures=table.measures,
        rows=tuple(table.rows.values()),
        paper=reading.plain(source, "source", "paper", str, ""),
        where=reading.plain(source, "source", "where", str, ""),
        about=tuple(read_text(reading.plain(data, "", "about", str, ""), "about", table, about_rows)),
        claims=read_claims(data.get("claims"), table, about_rows),
        pictures=read_pictures(data.get("pictures"), table, about_rows),
        calibration=read_calibration(data.get("calibration"), table, about_rows),
    )
    return report, reading
