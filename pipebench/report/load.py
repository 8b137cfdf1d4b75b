"""Load a report from YAML; all its faults are raised together, before anything runs."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from pipebench.errors import Fault, RecipeError, UserError, nearest
from pipebench.recipe.catalog import display
from pipebench.recipe.yaml_file import read_mapping
from pipebench.report.definition import Report
from pipebench.report.read_claims import read_calibration, read_claims, read_pictures, read_text
from pipebench.report.read_table import read_table
from pipebench.report.reading import Reading
from pipebench.report.recipes import Asked, asked_runs

_TOP = ("title", "source", "about", "columns", "measures", "runs", "rows", "claims", "pictures", "calibration")


def load_report(path: Path, only: Sequence[str] = (), engine: str | None = None) -> tuple[Report, list[Asked]]:
    """Load and validate a report, of `only` the rows of these names or patterns, with the recipe of every run.

    `engine` replaces that of every run that columns may change.

    Raises:
        RecipeError: with all faults, or a UserError if a pattern matches no row.
    """
    report, reading = read_report(path)
    report = with_rows(report, only)
    asked, faults = asked_runs(report, engine, whole=not only)
    if reading.faults or faults:
        raise RecipeError(dict.fromkeys([*reading.faults, *faults]))
    return report, asked


def with_rows(report: Report, only: Sequence[str]) -> Report:
    """Return a report with the rows that match a pattern (all if empty) and their pictures.

    Raises:
        UserError: a pattern matches no row.
    """
    names = [row.name for row in report.rows]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"--only: got {pattern[:60]!r}, allowed are {', '.join(names)}, or patterns"
                f"{nearest(pattern[:60], names)}"
            )
    rows = tuple(row for row in report.rows if not only or any(fnmatchcase(row.name, pattern) for pattern in only))
    known = {"", *(row.name for row in rows)}
    return replace(report, rows=rows, pictures=tuple(picture for picture in report.pictures if picture.row in known))


def read_report(path: Path) -> tuple[Report, Reading]:
    """Read a report's file; return what is valid of it, and its faults, recipes not loaded.

    Raises:
        RecipeError: the file isn't a mapping.
    """
    reading, content = Reading(display(path)), read_mapping(path)
    if {"model", "parallelism"} <= content.keys():
        raise RecipeError([Fault(reading.file, "", f"is a recipe, not a report: `pipebench run {display(path)}`")])
    data = reading.mapping(content, "", _TOP)
    table = read_table(data, reading)
    source = reading.mapping(data.get("source"), "source", ("paper", "where"))
    report = Report(
        name=path.stem,
        path=path,
        title=reading.plain(data, "", "title", str),
        columns=table.columns,
        measures=table.measures,
        rows=tuple(table.rows.values()),
        paper=reading.plain(source, "source", "paper", str, ""),
        where=reading.plain(source, "source", "where", str, ""),
        about=tuple(read_text(reading.plain(data, "", "about", str, ""), "about", table, reading)),
        claims=read_claims(data.get("claims"), table, reading),
        pictures=read_pictures(data.get("pictures"), table, reading),
        calibration=read_calibration(data.get("calibration"), table, reading),
    )
    return report, reading
