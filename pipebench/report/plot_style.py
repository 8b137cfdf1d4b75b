"""Common style of plots: colours, units along axes, titles.

Published values are grey and hollow; columns have Okabe and Ito's colours, distinct for colour-blind readers.
"""

from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

from pipebench.formats import shortened
from pipebench.report.definition import Measure, ReferenceLine, Row
from pipebench.report.evaluated import Evaluated, TableCell
from pipebench.report.wording import CHOSEN, CONSTRUCTED, FITTED, SUPPOSED, marks
from pipebench.show.pictures import CURVE_COLOURS, LINE_STYLES

MARKERS = "osD^vP*"
GREY = "#666666"
SMALL, NORMAL = 8.0, 9.0  # points
_TITLE_WIDTH = 40  # characters of a row's title
_AXIS_UNITS = {"s": "s", "bytes": "B", "samples/s": ""}


def colour(index: int) -> str:
    """Return a series' colour."""
    return CURVE_COLOURS[index % len(CURVE_COLOURS)]


def marker(index: int) -> str:
    """Return a series' marker."""
    return MARKERS[index % len(MARKERS)]


def line_style(column: int) -> str:
    """Return a column's line style, in pictures whose colours distinguish runs."""
    return LINE_STYLES[column % len(LINE_STYLES)]


def plain(text: str, width: int = _TITLE_WIDTH) -> str:
    """Return text safe from math mode, shortened to `width` characters."""
    return shortened(text, width).replace("$", r"\$")


def label_of(measure: Measure) -> str:
    """Return the axis label of a measure."""
    return f"{measure.title} [samples/s]" if measure.unit == "samples/s" else measure.title


# Marks of cells that are no pure predictions, in a few words.
_MARKS = {CONSTRUCTED: "by construction", FITTED: "fitted on", CHOSEN: "chosen in view of it", SUPPOSED: "a hypothesis"}


def mark_of(cell: TableCell) -> str:
    """Return the marks of a cell that pictures explain."""
    return "".join(mark for mark in marks(cell) if mark in _MARKS)


def explain_marks(figure: Figure, cells: Iterable[TableCell]) -> None:
    """Write the meaning of the cells' marks below a picture."""
    used = {mark for cell in cells for mark in mark_of(cell)}
    if used:
        meanings = "   ".join(f"{mark} {meaning}" for mark, meaning in _MARKS.items() if mark in used)
        figure.supxlabel(meanings, fontsize=SMALL, color=GREY)


def write_values(axis: Axis, unit: str) -> None:
    """Format tick labels of an axis in a measure's unit."""
    known: dict[str, Callable[[float], str]] = {"x": "{:g}x".format, "share": lambda value: f"{100 * value:g}%"}
    numbers = FuncFormatter(lambda value, _: known.get(unit, "{:,g}".format)(value))
    axis.set_major_formatter(EngFormatter(unit=_AXIS_UNITS[unit]) if unit in _AXIS_UNITS else numbers)


def has_values(evaluated: Evaluated, row: Row, measure: Measure) -> bool:
    """Return whether a row has a published number or a cell of a measure."""
    cells = (evaluated.cell(row.name, measure.name, column.name) for column in evaluated.report.columns)
    return published_value(row, measure) is not None or any(cell is not None for cell in cells)


def published_value(row: Row, measure: Measure) -> float | None:
    """Return the published number of a row's measure, None without one."""
    published = row.published.get(measure.published_name)
    return None if published is None else number_of(published.value)


def number_of(value: float | str | None) -> float | None:
    """Return a published or reproduced value that can be drawn; None for a plan, or nothing."""
    return None if isinstance(value, str) else value


def draw_line(axes: Axes, line: ReferenceLine | None, *, across: str = "y") -> None:
    """Draw a picture's reference line, if any, at its value on the axis `across`, which is extended to show it."""
    if line is None:
        return
    look: dict[str, Any] = {"color": GREY, "linestyle": (0, (4, 2)), "linewidth": 1.1, "label": plain(line.text, 60)}
    if across == "y":
        axes.axhline(line.at, **look)  # scales the axis, as later panels that share it may
    else:
        axes.axvline(line.at, **look)
        axes.set_xlim(right=max(axes.get_xlim()[1], 1.05 * line.at))


def legend(figure: Figure, panels: Iterable[Axes], most: int = 99, *, least: int = 1) -> None:
    """Write a legend of all labels of some panels above them, each label once.

    Args:
        figure: of the panels.
        panels: with labelled lines, bars or points.
        most: labels per line at most.
        least: fewest labels for which a legend is written.
    """
    named = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(named) >= least:
        look: dict[str, Any] = {"ncols": min(len(named), most), "frameon": False, "fontsize": SMALL}
        figure.legend(named.values(), named.keys(), loc="outside upper left", **look)


def finish(axes: Axes, *, grid: str = "both") -> None:
    """Remove spines and add a pale grid."""
    axes.grid(axis=grid, alpha=0.3)  # type: ignore[arg-type] # matplotlib's stubs want a literal
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)
