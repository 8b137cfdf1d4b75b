"""The page that says which mode to choose has the rows that were made, and says what is missing."""

import json
from pathlib import Path

from reports.studies.choose import CASES, MODES, ROWS, SERVERS, WORKERS, Found, kept, table
from reports.studies.choose_curves import CURVES

PAGE = Path(__file__).parents[2] / "reports" / "choose.md"


def test_the_page_s_table_is_of_the_rows_that_were_made() -> None:
    lines = PAGE.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("| model |"))
    made = list(table(kept()))
    assert lines[first : first + len(made)] == made
    every = len(CASES) * len(SERVERS) * len(WORKERS)
    assert f"{len(made) - 2} of {every} rows" in PAGE.read_text()


def test_every_row_has_all_modes_and_what_is_fastest_fits() -> None:
    for row in json.loads(ROWS.read_text()).values():
        found = [Found(**each) for each in row["modes"]]
        assert [each.mode for each in found] == [*MODES]
        assert all((each.samples_per_s > 0) is each.fits for each in found)


def test_the_page_says_how_long_the_longest_curve_took() -> None:
    longest = max(each["seconds"] for each in json.loads(CURVES.read_text()).values())
    assert f"at most {longest:.0f} s" in PAGE.read_text()
