"""Lines: a measure over a key of the rows, such as the number of GPUs; a panel per group, a line per column."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipebench.report import plot_style as style
from pipebench.report.definition import Measure, Picture, Row
from pipebench.report.evaluated import Evaluated

_WIDTH_IN, _HEIGHT_IN, _FRAME_IN = 2.4, 2.3, 0.6
_MOST_BESIDE = 5
_WIDE = 8.0  # maximum over minimum from which the horizontal axis is logarithmic
# Marker and label of a published value, by its bound.
_PUBLISHED = {
    "exact": ("o", "published"),
    "about": ("o", "published"),
    "at_least": ("^", "published: at least"),
    "at_most": ("v", "published: at most"),
}
_Place = str | float


def lines_figure(evaluated: Evaluated, picture: Picture) -> Figure | None:
    """Return the picture; None if no row has a position."""
    report = evaluated.report
    measure = report.measure(picture.measures[0])
    rows = [row for row in report.rows if picture.x in row.at and style.has_values(evaluated, row, measure)]
    if not rows:
        return None
    groups = list(dict.fromkeys(row.at.get(picture.group, "") for row in rows))
    beside = min(len(groups), _MOST_BESIDE)
    below = -(-len(groups) // beside)
    size = (max(5.0, _WIDTH_IN * beside), _FRAME_IN + max(3.2 if below == 1 else 0.0, _HEIGHT_IN * below))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(below, beside, sharex=True, sharey=True, squeeze=False).ravel().tolist()
    places = _places(rows, picture.x)
    for axes, group in zip(panels, groups, strict=False):
        own = [row for row in rows if row.at.get(picture.group, "") == group]
        _draw(axes, evaluated, own, measure, [places[row.at[picture.x]] for row in own])
        if picture.bound:
            _draw_bound(axes, evaluated, own, report.measure(picture.bound), [places[row.at[picture.x]] for row in own])
        style.draw_line(axes, picture.line)
        axes.set_title(style.plain(f"{group}"), fontsize=style.NORMAL, loc="left")
    for axes in panels[len(groups) :]:
        axes.remove()
    _finish(panels[: len(groups)], places, beside)
    figure.supxlabel(style.plain(picture.x.replace("_", " ")), fontsize=style.NORMAL)
    figure.supylabel(style.plain(style.label_of(measure), 60), fontsize=style.NORMAL)
    style.write_values(panels[0].yaxis, measure.unit)
    style.legend(figure, panels)
    return figure


def _places(rows: Sequence[Row], key: str) -> dict[_Place, float]:
    """Return the position of every value of the key: numbers as they are, texts enumerated."""
    values = list(dict.fromkeys(row.at[key] for row in rows))
    if all(not isinstance(value, str) for value in values):
        return {value: float(value) for value in values}
    return {value: float(index) for index, value in enumerate(values)}


def _draw(axes: Axes, evaluated: Evaluated, rows: Sequence[Row], measure: Measure, places: Sequence[float]) -> None:
    for place, row in zip(places, rows, strict=True):
        published = row.published.get(measure.published_name)
        if published is not None and not isinstance(published.value, str):
            sign, label = _PUBLISHED[published.bound]
            axes.plot(
                place, published.value, linestyle="none", marker=sign, markersize=7, markerfacecolor="none",
                color=style.GREY, label=label, zorder=3,
            )  # fmt: skip
    columns = evaluated.report.columns
    for index, column in enumerate(columns):
        drawn = _along(evaluated, rows, measure, column.name, places)
        if drawn:
            at, values, lows, highs = zip(*drawn, strict=True)
            # Earlier lines are wider, so that a line of equal values does not hide them.
            wider = len(columns) - 1 - index
            axes.plot(
                at, values, color=style.colour(index), marker=style.marker(index), markersize=3.5 + 2.0 * wider,
                linewidth=1.4 + 1.4 * wider, label=style.plain(column.title),
            )  # fmt: skip
            axes.fill_between(at, lows, highs, color=style.colour(index), alpha=0.2, linewidth=0)


def _along(
    evaluated: Evaluated, rows: Sequence[Row], measure: Measure, column: str, places: Sequence[float]
) -> list[tuple[float, float, float, float]]:
    """Return (place, value, smallest and largest value over seeds) of every row that has a value, sorted by place."""
    found = []
    for place, row in zip(places, rows, strict=True):
        cell = evaluated.cell(row.name, measure.name, column)
        if cell is not None and (value := style.number_of(cell.value)) is not None:
            low, high = (value if end is None else end for end in (cell.low, cell.high))
            found.append((place, value, low, high))
    return sorted(found)


def _draw_bound(axes: Axes, evaluated: Evaluated, rows: Sequence[Row], bound: Measure, places: Sequence[float]) -> None:
    """Draw the upper bound of each column; equal bounds share a line."""
    columns = [column.name for column in evaluated.report.columns]
    lines = dict.fromkeys(tuple(_along(evaluated, rows, bound, column, places)) for column in columns)
    for line in filter(None, lines):
        at, values, _, _ = zip(*line, strict=True)
        axes.plot(at, values, color="black", linestyle="--", linewidth=1.2, label=style.plain(bound.title))


def _finish(panels: Sequence[Axes], places: dict[_Place, float], beside: int) -> None:
    ticks = list(places.values())
    wide = all(not isinstance(value, str) for value in places) and min(ticks) > 0 and max(ticks) / min(ticks) >= _WIDE
    for index, axes in enumerate(panels):
        if wide:
            axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xticks(
            ticks, [f"{value:g}" if not isinstance(value, str) else style.plain(value, 16) for value in places]
        )
        axes.set_ylim(bottom=0)
        style.finish(axes)
        axes.tick_params(labelbottom=index + beside >= len(panels))
