"""Text of published and reproduced values in their unit, and marks beside them."""

from collections.abc import Callable, Sequence

from pipebench.formats import UNKNOWN, num_bytes, number, ratio, seconds
from pipebench.report.definition import Measure, Published
from pipebench.report.evaluated import TableCell
from pipebench.report.reasons import same_plan
from pipebench.schedule.notation import STRAIGHT

CONSTRUCTED, FITTED, CHOSEN, SUPPOSED, REMARKED = "=", "*", "^", "?", "!"
MARKS = {
    CONSTRUCTED: "holds by construction: such cells are counted apart",
    FITTED: "a constant of the column was fitted on this cell; all others are predictions",
    CHOSEN: "something was chosen with this result in view, named below its first table: fitted, in effect",
    SUPPOSED: "rests on a hypothesis, named below its first table",
    REMARKED: "stands under a remark below its first table: it wouldn't fit in memory, some seeds missed their target "
    "or aren't trained, or an earlier release trained them",
}
_MOST_TITLES = 4
_LEAST_SHARE = 0.0001  # smaller shares are written as `<0.01%`
_BOUNDS = {"exact": "", "about": "about ", "at_least": "≥ ", "at_most": "≤ "}


def _share(value: float) -> str:
    return f"<{100 * _LEAST_SHARE:g}%" if 0 < value < _LEAST_SHARE else f"{number(100 * value)}%"


_Format = Callable[[float], str]
_REPRODUCED: dict[str, _Format] = {
    "x": ratio,
    "share": _share,
    "s": seconds,
    "bytes": num_bytes,
    "samples/s": lambda value: f"{number(value)} samples/s",
    "count": lambda value: f"{value:,.0f}" if value == int(value) else number(value),
    "none": number,
}
# Published numbers are written with all the digits that were printed.
_PUBLISHED: dict[str, _Format] = {
    **_REPRODUCED, "x": "{:.6g}x".format, "none": "{:.6g}".format, "share": lambda value: f"{100 * value:.6g}%",
}  # fmt: skip


def number_text(value: float, unit: str) -> str:
    """Return a reproduced number in one of `UNITS`."""
    return _REPRODUCED[unit](value)


def published_number(value: float, unit: str) -> str:
    """Return a published number in one of `UNITS`, with the digits it was printed with."""
    return _PUBLISHED[unit](value)


def reproduced_text(cell: TableCell | None, measure: Measure) -> str:
    """Return a reproduced value, with the range of several seeds, or the problem."""
    if cell is None:
        return UNKNOWN
    if cell.value is None:
        return UNKNOWN if cell.problem is None else cell.problem.partition(":")[0]
    if isinstance(cell.value, str):
        return cell.value
    write = _REPRODUCED[measure.unit]
    low, high = (write(cell.value if end is None else end) for end in (cell.low, cell.high))
    return write(cell.value) if low == high else f"{write(cell.value)} [{low} to {high}]"


def published_text(published: Published | None, measure: Measure) -> str:
    """Return a published value, a bound with its sign."""
    if published is None:
        return UNKNOWN
    if isinstance(published.value, str):
        return published.value
    return f"{_BOUNDS[published.bound]}{published_number(published.value, measure.unit)}"


def compared_text(cell: TableCell | None) -> str:
    """Return reproduced / published, or whether a published bound holds."""
    if cell is None or cell.published is None or isinstance(cell.value, str | None):
        return UNKNOWN
    published, bound = cell.published.value, cell.published.bound
    if isinstance(published, str):
        return UNKNOWN
    if bound in ("at_least", "at_most"):
        holds = cell.value >= published if bound == "at_least" else cell.value <= published
        return "kept" if holds else "not kept"
    return f"{cell.value / published:.2f}" if published else UNKNOWN


def marks(cell: TableCell | None) -> str:
    """Return the marks of a cell, in the order of `MARKS`."""
    if cell is None:
        return ""
    marked = {
        CONSTRUCTED: cell.by_construction,
        FITTED: cell.fitted,
        CHOSEN: cell.chosen,
        SUPPOSED: cell.hypothesis,
        REMARKED: cell.remarks,
    }
    return "".join(mark for mark, holds in marked.items() if holds)


def plan_class(plan: str) -> str:
    """Return the class of a plan in the papers' notation.

    >>> plan_class("16"), plan_class("15-1"), plan_class("Straight"), plan_class("1-1-1")
    ('data parallel', 'replicated', 'straight', 'straight')
    """
    if same_plan(plan, STRAIGHT):
        return STRAIGHT
    return "replicated" if "-" in plan else "data parallel"


def several(titles: Sequence[str]) -> str:
    """Return titles of rows in a line, abbreviated if many."""
    return "; ".join(titles) if len(titles) <= _MOST_TITLES else f"{titles[0]} and {len(titles) - 1} more"
