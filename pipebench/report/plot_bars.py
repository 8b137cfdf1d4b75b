"""Bars: published and reproduced values of every row, a panel per measure."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from pipebench.report import plot_style as style
from pipebench.report.definition import Measure, Picture, Row
from pipebench.report.evaluated import Evaluated, TableCell
from pipebench.report.wording import published_text, reproduced_text

_BAR_IN, _GAP_IN, _FRAME_IN = 0.155, 0.12, 1.1
_NAMES_IN, _PANEL_IN, _MOST_IN = 2.0, 4.4, 12.0  # widths of rows' titles, of a panel, and of the figure at most
_MOST_TICKS = 6
_SHORTEST = 0.1  # scale of a panel over the longest of its unit
_FULL = 0.86  # of a bar's slot
_ROOM, _ROOM_FOR_RANGES = 0.3, 0.6  # share of the longest bar that is left for the values written after the bars
_AFTER_PT, _CLEAR_PX = 3, 3  # between a bar's end and its value, and between a value and a bound's line at least


def bars_figure(evaluated: Evaluated, picture: Picture) -> Figure | None:
    """Return the picture; None if no row has a value."""
    report = evaluated.report
    measures = [report.measure(name) for name in picture.measures]
    rows = [row for row in report.rows if any(style.has_values(evaluated, row, measure) for measure in measures)]
    if not rows:
        return None
    publishes = any(style.published_value(row, measure) is not None for row in rows for measure in measures)
    num_bars = len(report.columns) + publishes
    height_in = _FRAME_IN + len(rows) * (num_bars * _BAR_IN + _GAP_IN)
    width_in = min(_NAMES_IN + _PANEL_IN * len(measures), _MOST_IN)
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    bound = report.measure(picture.bound) if picture.bound else None
    for axes, measure in zip(panels, measures, strict=True):
        _draw(axes, evaluated, rows, measure, bound, publishes=publishes)
        style.draw_line(axes, picture.line, across="x")
    _share_scales(panels, measures)
    panels[0].set_yticks(range(len(rows)), [style.plain(row.title) for row in rows])
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    style.legend(figure, panels[:1], least=2)
    style.explain_marks(figure, [cell for cell in evaluated.cells if cell.measure in picture.measures])
    if bound is not None:
        _step_aside(figure, panels)
    return figure


def _share_scales(panels: Sequence[Axes], measures: Sequence[Measure]) -> None:
    """Give panels of the same unit the same scale, unless all bars of one would be too short to be seen."""
    for unit in {measure.unit for measure in measures}:
        alike = [axes for axes, measure in zip(panels, measures, strict=True) if measure.unit == unit]
        ends = [axes.get_xlim()[1] for axes in alike]
        for axes, end in zip(alike, ends, strict=True):
            axes.set_xlim(0, max(ends) if min(ends) > _SHORTEST * max(ends) else end)
            if unit == "share":  # the room for values after the bars has no ticks
                axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 1])


def _step_aside(figure: Figure, panels: Sequence[Axes]) -> None:
    """Move values that a bound's line would touch, after layout: into their bars, or after the line if they don't fit.

    After the line of a long bar a value would look like the bound's.
    """
    figure.draw_without_rendering()
    for axes in panels:
        for text in axes.texts:
            box = text.get_window_extent().padded(_CLEAR_PX, 0)
            crossing = [line for line in axes.lines if line.get_window_extent().overlaps(box)]
            if crossing and isinstance(text, Annotation):
                end = text.xy
                if box.width + _CLEAR_PX < axes.transData.transform(end)[0] - axes.bbox.x0:
                    text.set(position=(-_AFTER_PT, 0), ha="right", color="white")
                else:
                    text.xy = (max(float(x) for line in crossing for x in line.get_xdata()), end[1])  # type: ignore[union-attr,arg-type] # numbers


def _draw(
    axes: Axes, evaluated: Evaluated, rows: Sequence[Row], measure: Measure, bound: Measure | None, *, publishes: bool
) -> None:
    columns = evaluated.report.columns
    num_bars = len(columns) + publishes
    thick = _BAR_IN / (_BAR_IN * num_bars + _GAP_IN)
    first = -thick * (num_bars - 1) / 2
    ends = [0.0]
    if publishes:
        ends += _draw_published(axes, rows, measure, first, _FULL * thick)
    for index, column in enumerate(columns):
        cells = [evaluated.cell(row.name, measure.name, column.name) for row in rows]
        places = [row + first + thick * (index + publishes) for row in range(len(rows))]
        values = [_number(cell) or 0.0 for cell in cells]
        axes.barh(
            places, values, _FULL * thick, color=style.colour(index), linewidth=0, label=style.plain(column.title)
        )
        for place, cell, value in zip(places, cells, values, strict=True):
            if cell is not None:
                ends.append(_draw_range(axes, cell, place, value))
                _write(
                    axes, ends[-1], place, f"{reproduced_text(cell, measure)} {style.mark_of(cell)}".strip(), "black"
                )
        if bound is not None:
            limits = [_number(evaluated.cell(row.name, bound.name, column.name)) for row in rows]
            ends += _draw_bound(axes, limits, places, thick, style.plain(bound.title))
    ranges = any(cell.measure == measure.name and cell.low != cell.high for cell in evaluated.cells)
    axes.set_xlim(0, (1 + (_ROOM_FOR_RANGES if ranges else _ROOM)) * max(ends) or 1.0)
    axes.set_xlabel(style.plain(style.label_of(measure), 70), fontsize=style.NORMAL)
    axes.locator_params(axis="x", nbins=_MOST_TICKS)
    style.write_values(axes.xaxis, measure.unit)
    style.finish(axes, grid="x")
    axes.tick_params(axis="y", length=0)


def _draw_published(axes: Axes, rows: Sequence[Row], measure: Measure, first: float, thick: float) -> Iterator[float]:
    """Draw published values, bounds dotted; yield the ends of the bars."""
    values = [style.published_value(row, measure) for row in rows]
    bars = axes.barh(
        [row + first for row in range(len(rows))], [value or 0.0 for value in values], thick, color="white",
        edgecolor=style.GREY, linewidth=0.8, label="published",
    )  # fmt: skip
    for index, (bar, row, value) in enumerate(zip(bars, rows, values, strict=True)):
        if value is not None:
            published = row.published[measure.published_name]
            bar.set_linestyle("-" if published.bound in ("exact", "about") else ":")
            _write(axes, value, index + first, published_text(published, measure), style.GREY)
            yield value


def _draw_bound(
    axes: Axes, limits: Sequence[float | None], places: Sequence[float], thick: float, title: str
) -> Iterator[float]:
    """Draw a column's upper bounds as a line across each bar; yield their positions."""
    for value, place in zip(limits, places, strict=True):
        if value is not None:
            ends = [place - thick / 2, place + thick / 2]
            axes.plot([value, value], ends, color="black", linewidth=1.6, label=title)
            yield value


def _draw_range(axes: Axes, cell: TableCell, place: float, value: float) -> float:
    """Draw the range over seeds, if any; return the end of bar and range."""
    if cell.low is None or cell.high is None or cell.low == cell.high:
        return value
    axes.plot([cell.low, cell.high], [place, place], color="black", linewidth=0.9)
    return max(value, cell.high)


def _write(axes: Axes, end: float, place: float, text: str, ink: str) -> None:
    at = {"xytext": (_AFTER_PT, 0), "textcoords": "offset points"}
    axes.annotate(text, (end, place), va="center", fontsize=6.5, color=ink, **at)  # type: ignore[arg-type] # as it is


def _number(cell: TableCell | None) -> float | None:
    return None if cell is None else style.number_of(cell.value)
