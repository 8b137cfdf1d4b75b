"""Markdown tables of the studies' pages."""

from collections.abc import Iterable, Sequence


def row(cells: Iterable[object]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[str], rows: Iterable[Iterable[object]], rule: Sequence[str] = ()) -> str:
    """Return a table.

    Args:
        head: headings, one per column.
        rows: cells, one per column.
        rule: cells of the line below the headings, such as `--:` for a column that is aligned to the right; aligned
            to the left by default.
    """
    return "\n".join(map(row, (head, rule or ["---"] * len(head), *rows)))
