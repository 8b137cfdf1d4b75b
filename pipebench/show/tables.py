"""Tables for a terminal whose words are never broken; columns that don't fit continue below, beside the rows' names.

Widths are computed here, because rich would narrow columns to single letters.
"""

from collections.abc import Iterable, Sequence
from copy import copy

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipebench.errors import printable
from pipebench.show.terminal import print_plain

_Padding = tuple[int, int]
_PADDINGS: tuple[_Padding, ...] = ((0, 1), (0, 0))  # (lines, blanks) around each cell
_Part = Sequence[tuple[int, int]]  # (index, width) of columns beside each other


def new_table(*headings: str, left: int = 1) -> Table:
    """Return an empty table; the first `left` columns and any named `plan` are left-aligned, others right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=_PADDINGS[0], collapse_padding=True)
    for index, heading in enumerate(headings):
        is_left = index < left or heading == "plan"
        table.add_column(heading, justify="left" if is_left else "right", no_wrap=True)
    return table


def print_table(console: Console, table: Table, *, indent: int = 0, left: int = 1) -> None:
    """Print a table of `new_table`, in as many parts as needed to fit the console.

    Headings wrap between words, as do columns whose `no_wrap` is unset.

    Args:
        console: where to print.
        table: as `new_table` returns it, with rows.
        indent: blanks before each line.
        left: the first columns, which name a row: every part begins with them, or with fewer if they leave no room.
    """
    table.padding, parts = _fitting(console, table, console.width - indent, left)
    for part in parts:
        print_plain(console, Padding(_drawn(table, part), (0, 0, 0, indent)))


def print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Print names and their texts below each other; nothing if there are none."""
    grid = Table.grid(padding=(0, 2))
    for name, text in facts:
        grid.add_row(Text(name, style="dim"), Text(printable(text)))
    if grid.row_count:
        print_plain(console, Padding(grid, (0, 0, 0, 2)))


def print_groups(console: Console, groups: Sequence[tuple[str, Table]]) -> None:
    """Print tables of the same columns below each other, each under its title if any."""
    together = copy_without_rows(groups[0][1])
    for _, table in groups:
        for row in zip(*(column.cells for column in table.columns), strict=True):
            together.add_row(*row)
    padding, parts = _fitting(console, together, console.width, 1)
    for part in parts:
        for title, table in groups:
            table.padding = padding
            if title:
                print_plain(console, Text(f" {title}", style="bold"))
            print_plain(console, _drawn(table, part))


def copy_without_rows(table: Table) -> Table:
    """Return a table with the same columns and no rows."""
    new = copy(table)
    new.rows = []
    new.columns = [column.copy() for column in table.columns]
    return new


def _fitting(console: Console, table: Table, width: int, left: int) -> tuple[_Padding, list[_Part]]:
    """Return the padding that needs the fewest parts, the wider one of two equal ones, and the parts."""
    choices = []
    for padding in _PADDINGS:
        table.padding = padding
        choices.append((padding, _parts(console, table, width, left)))
    return min(choices, key=lambda choice: len(choice[1]))


def _parts(console: Console, table: Table, width: int, left: int) -> list[_Part]:
    """Return the columns of each part, and their widths."""
    most = [max(_natural(column.header), *map(_natural, column.cells), 0) for column in table.columns]
    least = [
        max(_longest_word(column.header), *map(_natural if column.no_wrap else _longest_word, column.cells), 0)
        for column in table.columns
    ]

    def fits(indices: Iterable[int]) -> bool:
        return _width(console, table, [(each, least[each]) for each in indices]) <= width

    while left > 1 and not all(fits([*range(left), index]) for index in range(left, len(least))):
        left -= 1  # the last name column is moved to the columns that continue below
    # Greedy, in the columns' order: a part takes columns until the next one doesn't fit.
    parts: list[_Part] = []
    rest = list(range(left, len(least)))
    while rest or not parts:
        chosen = [*range(left), *rest[:1]]
        for index in rest[1:]:
            if not fits([*chosen, index]):
                break
            chosen.append(index)
        rest = [index for index in rest if index not in chosen]
        spare = width - _width(console, table, [(each, least[each]) for each in chosen])
        parts.append(_widened(chosen, least, most, spare))
    return parts


def _widened(chosen: Sequence[int], least: Sequence[int], most: Sequence[int], spare: int) -> _Part:
    """Return the columns of a part with their widths; spare width goes to the first columns."""
    part = []
    for index in chosen:
        more = max(0, min(spare, most[index] - least[index]))
        spare -= more
        part.append((index, least[index] + more))
    return part


def _drawn(table: Table, part: _Part) -> Table:
    """Return a table of some columns, with headings that may wrap."""
    new = copy(table)
    new.columns = []
    for new_index, (index, width) in enumerate(part):
        column = copy(table.columns[index])
        column._index, column.width, column.no_wrap = new_index, width, False  # headings may wrap
        new.columns.append(column)
    return new


def _width(console: Console, table: Table, part: _Part) -> int:
    return Measurement.get(console, console.options.update(width=10_000), _drawn(table, part)).maximum


def _natural(content: RenderableType) -> int:
    return cell_len(_plain(content))


def _longest_word(content: RenderableType) -> int:
    return max(map(cell_len, _plain(content).split()), default=0)


def _plain(content: RenderableType) -> str:
    return content.plain if isinstance(content, Text) else str(content)
