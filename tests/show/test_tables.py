"""Tables fit the console: in parts beside their rows' names, without broken words."""

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipebench.show.tables import new_table, print_table

WORDS = st.text("abcxyz0123456789", min_size=1, max_size=9)
CELLS = st.lists(WORDS, min_size=1, max_size=3).map(" ".join)


def printed(headings: list[str], rows: list[list[str]], width: int, **how: int) -> list[str]:
    table = new_table(*headings)
    for row in rows:
        table.add_row(*row)
    to = Console(file=io.StringIO(), width=width, highlight=False)
    print_table(to, table, **how)
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue().splitlines()


def test_a_table_that_fits_is_in_one_part() -> None:
    lines = printed(["run", "plan", "time to accuracy"], [["dp", "4", "6.00 s"]], 80)
    assert [line.split() for line in lines if line.strip()] == [
        ["run", "plan", "time", "to", "accuracy"], [lines[2].strip()], ["dp", "4", "6.00", "s"]
    ]  # fmt: skip


def test_headings_wrap_before_columns_go_below() -> None:
    lines = printed(["run", "time to accuracy", "epoch time"], [["dp", "6.00 s", "1.80 s"]], 24)
    assert [line.split() for line in lines if "dp" in line] == [["dp", "6.00", "s", "1.80", "s"]]


def test_columns_that_do_not_fit_go_below_with_the_names_repeated() -> None:
    lines = printed(["run", "throughput", "memory"], [["gpipe", "2,222 samples/s", "1 GB"]], 24)
    assert [line.split()[0] for line in lines if "gpipe" in line] == ["gpipe", "gpipe"]
    assert "2,222 samples/s" in "\n".join(lines)
    assert max(map(len, lines)) <= 24


def test_long_names_are_complete_and_beside_the_other_columns_if_they_fit() -> None:
    """`pipebench runs` cut ids, dates and outcomes on a terminal of 80 columns, or had no column of ids at all."""
    row = ["289a32ff", "2026-11-29 07:02", "pipedream straight, seed 0", "a-recipe-of-a-long-name", "completed"]
    lines = printed(["id", "began", "run", "recipe", "outcome"], [row], 60, left=3)
    assert [" ".join(line.split()) for line in lines if "289a" in line] == [
        "289a32ff 2026-11-29 07:02 pipedream straight, seed 0",
        "289a32ff 2026-11-29 07:02 a-recipe-of-a-long-name",
        "289a32ff 2026-11-29 07:02 completed",
    ]


def test_an_indented_table_has_less_room() -> None:
    lines = printed(["run", "plan"], [["abcdef", "straight"]], 20, indent=2)
    assert all(line.startswith("  ") for line in lines if line.strip())
    assert max(map(len, lines)) <= 20


@settings(deadline=None)
@given(st.integers(1, 6).flatmap(lambda n: st.tuples(
    st.lists(CELLS, min_size=n, max_size=n), st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=3)
)), st.integers(45, 120))  # fmt: skip
def test_every_cell_is_whole_and_no_line_too_long(content: tuple[list[str], list[list[str]]], width: int) -> None:
    headings, rows = content
    rows = [[f"row{index}", *row] for index, row in enumerate(rows)]
    lines = printed(["run", *headings], rows, width)
    assert max(map(len, lines)) <= width
    for index, row in enumerate(rows):
        own = " ".join(line for line in lines if line.split()[:1] == [f"row{index}"])
        assert [" ".join(own.replace(f"row{index}", "").split())] == [" ".join(row[1:])]
    words = " ".join(lines).split()
    assert {word for heading in headings for word in heading.split()} <= set(words)
