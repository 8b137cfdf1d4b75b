"""Checks that a study's page has the rows that the current code makes; tests make few rows again."""

from collections.abc import Iterable
from pathlib import Path

REPORTS = Path(__file__).parents[2] / "reports"


def check_rows(rows: Iterable[str], page: str, command: str = "") -> None:
    """Fail where a row isn't on a page of `reports/`, and say which command makes that again."""
    lines = {*(REPORTS / page).read_text().splitlines()}
    missing = [row for row in rows if row not in lines]
    command = command or f"python -m reports.studies.{page.removesuffix('.md')} > reports/{page}"
    assert not missing, "\n".join([f"reports/{page} is old: `{command}` makes it again. Today's code makes", *missing])
