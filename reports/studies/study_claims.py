"""Claims about a study's page: expressions over the cells of its tables, evaluated like a report's claims.

Studies write Markdown and no file of values. The index of coverage names the columns that a claim reads, so that a
study's answer has a number, a ratio and a verdict and not only a link.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipebench.errors import RecipeError
from pipebench.report.definition import ClaimedNumber, PublishedClaim
from pipebench.report.evaluate import verdict
from pipebench.report.evaluated import Verdict
from pipebench.report.expressions import Cells, Lookup, NoValueError, Value, claim_expression, quoted_expression
from pipebench.report.reading import Reading

KEYS = ("page", "section", "columns", "text", "holds", "tolerance", "value", "unit", "published", "within", "apart")
_NUMBER = re.compile(r"((?:(?<![^\s(])-)?\d[\d,]*(?:\.\d+)?)(?: ?(ms|us|%|s|x))?(?![\w.])")
_SCALES = {"ms": 1e-3, "us": 1e-6, "%": 1e-2}


@dataclass(frozen=True)
class StudyClaim:
    """A claim on the cells of a study's page."""

    page: str  # the page's path in the repository
    section: str  # beginning of the heading of level two above the tables; "" for the whole page
    # Heading of the column, and index of the number within each of its cells, by the name that expressions use.
    columns: Mapping[str, tuple[str, int]]
    claim: PublishedClaim  # `holds`, a number, or both: then the number is a bound, and `holds` decides
    apart: str = ""  # why scores don't count its number; "" if they do

    @property
    def is_bound(self) -> bool:
        """Whether its number is a bound and not a value."""
        return self.claim.number is not None and self.claim.holds is not None


def read_study_claim(given: Mapping[str, Any], key: str, file: str, root: Path) -> StudyClaim:
    """Parse a claim of the index and check it against the page.

    Args:
        given: the claim, as YAML has it.
        key: its full key, for errors.
        file: name of the index, for errors.
        root: folder that pages are relative to.

    Raises:
        RecipeError: the claim is invalid, or the page has no such column or row.
    """
    reading = Reading(file)
    data = reading.mapping(given, key, KEYS)
    page, section = reading.plain(data, key, "page", str), reading.plain(data, key, "section", str, "")
    named = reading.named(data.get("columns"), f"{key}.columns").items()
    columns = {name: (str(at[0]), int(at[1])) if isinstance(at, list) else (str(at), 0) for name, at in named}
    found: PublishedClaim | None = None
    try:
        cells = cells_of((root / page).read_text(encoding="utf-8"), section, columns)
        found = _claim(data, columns, [*dict.fromkeys(row for rows in cells.values() for row in rows)])
    except (ValueError, KeyError, OSError) as error:
        reading.fault(key, f"{page}: {error}")
    if reading.faults or found is None:
        raise RecipeError(reading.faults)
    return StudyClaim(page, section, columns, found, reading.plain(data, key, "apart", str, ""))


def _claim(data: Mapping[str, Any], columns: Mapping[str, Any], rows: Sequence[str]) -> PublishedClaim:
    number: ClaimedNumber | None = None
    if "value" in data:
        expression = quoted_expression(str(data["value"]), [*columns], rows)
        number = ClaimedNumber(expression, str(data["unit"]), float(data["published"]), float(data.get("within", 0)))
    holds = claim_expression(str(data["holds"]), [*columns], rows) if "holds" in data else None
    if holds is None and (number is None or not number.within):
        raise ValueError("needed is holds, or value with published and within")
    return PublishedClaim(str(data["text"]), holds=holds, tolerance=str(data.get("tolerance", "")), number=number)


def cells_of(page: str, section: str, columns: Mapping[str, tuple[str, int]]) -> dict[str, dict[str, float]]:
    """Return the numbers of a page's tables by column and row; of several rows of one name, the first.

    Milliseconds and microseconds become seconds, per cent a fraction; cells without a number are left out.

    Args:
        page: Markdown.
        section: see `StudyClaim`.
        columns: see `StudyClaim`.

    Raises:
        ValueError: no table has one of the columns.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in columns}
    headings: list[str] = []
    missing = {heading for heading, _ in columns.values()}
    for line in _under(page, section):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            headings = []
        elif not headings:
            headings = cells
            missing -= {*cells}
        for name, (heading, index) in columns.items() if cells and cells is not headings else ():
            if heading in headings and (numbers := numbers_in(cells[headings.index(heading)]))[index:]:
                found[name].setdefault(cells[0], numbers[index])
    if missing:
        raise ValueError(f"no table has a column {min(missing)!r}")
    return found


def _under(page: str, section: str) -> Iterator[str]:
    is_in = not section
    for line in page.splitlines():
        if section and line.startswith("## "):
            is_in = line.removeprefix("## ").startswith(section)
        if is_in:
            yield line


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a cell, scaled by their units.

    >>> numbers_in("1,262 / 171"), numbers_in("254 ms (215 ms to 293 ms)")[0], numbers_in("3-4"), numbers_in("-50%")
    ([1262.0, 171.0], 0.254, [3.0, 4.0], [-0.5])
    """
    return [float(each[1].replace(",", "")) * _SCALES.get(each[2], 1.0) for each in _NUMBER.finditer(text)]


def judge(claim: StudyClaim, root: Path) -> tuple[Verdict, float | None]:
    """Evaluate a claim on its page below `root`; see `judged`."""
    text = (root / claim.page).read_text(encoding="utf-8")
    return judged(claim, cells_of(text, claim.section, claim.columns))


def judged(claim: StudyClaim, cells: Mapping[str, Mapping[str, float]]) -> tuple[Verdict, float | None]:
    """Evaluate a claim on cells by column and row; return the verdict and the claim's number, if it has one.

    Raises:
        NoValueError: there is no value that the claim reads.
    """
    lookup, of = _lookup_in(cells), claim.claim
    if not claim.is_bound:
        found = verdict(of, "", lookup)
        return found, found.value
    number = verdict(PublishedClaim(of.text, number=of.number), "", lookup).value
    return verdict(PublishedClaim(of.text, holds=of.holds), "", lookup), number


def _lookup_in(cells: Mapping[str, Mapping[str, float]]) -> Lookup:
    """Return the function by which expressions read cells: the one of a row, or all whose row matches a pattern."""

    def lookup(column: str, row: str) -> Value:
        rows = cells[column]
        if row in rows:
            return rows[row]
        found = {name: value for name, value in rows.items() if not row or fnmatchcase(name, row)}
        if not found:
            raise NoValueError(f"{column} has no value{f' of {row}' if row else ''}")
        return Cells(found)

    return lookup
