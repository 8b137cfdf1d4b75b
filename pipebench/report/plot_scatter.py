"""Scatter: reproduced against published values on logarithmic axes, a point per row, measure and column.

The line is equality, the band a factor of 1.2 around it. Points are labelled where there is room; equal points share a
label.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import Bbox

from pipebench.report.definition import Picture
from pipebench.report.evaluated import Evaluated
from pipebench.report.plot_style import GREY, SMALL, colour, explain_marks, finish, mark_of, marker, plain, write_values

_SIDE_IN = 6.4
_BAND = 1.2
_NAME_POINTS = 6.5
_HALO = (withStroke(linewidth=2, foreground="white"),)  # keeps a label legible on the grid and the band
# Positions of labels, best first: offset in points, horizontal and vertical alignment.
_PLACES = (
    (6, 0, "left", "center"), (-6, 0, "right", "center"), (0, 6, "center", "bottom"), (0, -6, "center", "top"),
    (5, 5, "left", "bottom"), (-5, 5, "right", "bottom"), (5, -5, "left", "top"), (-5, -5, "right", "top"),
    (14, 6, "center", "bottom"), (-14, 6, "center", "bottom"), (14, -6, "center", "top"), (-14, -6, "center", "top"),
)  # fmt: skip


@dataclass(frozen=True)
class _Point:
    """A cell with an exact published value; indices of column and measure."""

    title: str
    column: int
    measure: int
    published: float
    reproduced: float
    mark: str  # "" for a pure prediction

    @property
    def label(self) -> str:
        """The row's title and the mark."""
        return f"{self.title} {self.mark}".strip()


def scatter_figure(evaluated: Evaluated, picture: Picture) -> Figure | None:
    """Return the picture; None if no cell has both values above 0."""
    report, points = evaluated.report, list(_points(evaluated, picture))
    if not points:
        return None
    figure = Figure(figsize=(_SIDE_IN, _SIDE_IN), layout="constrained")
    axes = figure.add_subplot()
    values = [value for point in points for value in (point.published, point.reproduced)]
    low, high = min(values) / 1.35, max(values) * 1.35
    below, above = ([end * factor for end in (low, high)] for factor in (1 / _BAND, _BAND))
    axes.fill_between([low, high], below, above, color="#EEEEEE", lw=0, label=f"within a factor of {_BAND:g}")
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8)
    measures = [report.measure(name) for name in picture.measures]
    for index, column in enumerate(report.columns):
        for number, measure in enumerate(measures):
            own = [point for point in points if (point.column, point.measure) == (index, number)]
            label = ", ".join(
                [*([column.title] if len(report.columns) > 1 else []), *([measure.title] if len(measures) > 1 else [])]
            )
            axes.plot(
                [point.published for point in own], [point.reproduced for point in own], linestyle="none", markersize=6,
                marker=marker(number), color=colour(index), alpha=0.85, label=plain(label, 60) if own else "",
            )  # fmt: skip
            hollow = [point for point in own if point.mark]  # no pure predictions
            axes.plot(
                [point.published for point in hollow], [point.reproduced for point in hollow], linestyle="none",
                markersize=3.5, marker=marker(number), color="white",
            )  # fmt: skip
    for axis, what in ((axes.xaxis, "published"), (axes.yaxis, "reproduced")):
        axis.set_label_text(plain(f"{measures[0].title}, {what}" if len(measures) == 1 else what, 70))
    _scale(axes, low, high)
    for axis in (axes.xaxis, axes.yaxis):
        write_values(axis, measures[0].unit)
    axes.set_aspect("equal")
    finish(axes)
    explain_marks(figure, (cell for cell in evaluated.cells if cell.measure in picture.measures and cell.ratio))
    axes.legend(frameon=False, fontsize=SMALL, loc="upper left")
    _name(figure, axes, points, len(report.columns) - 1)
    return figure


def _points(evaluated: Evaluated, picture: Picture) -> Iterator[_Point]:
    report = evaluated.report
    for row in report.rows:
        for number, name in enumerate(picture.measures):
            for index, column in enumerate(report.columns):
                cell = evaluated.cell(row.name, name, column.name)
                if cell is not None and cell.ratio is not None and cell.ratio > 0:
                    assert cell.published is not None
                    published, reproduced = cast("float", cell.published.value), cast("float", cell.value)
                    if published > 0:
                        yield _Point(row.title, index, number, published, reproduced, mark_of(cell))


def _scale(axes: Axes, low: float, high: float) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / low < 200 else (1,)))
        axis.set_minor_locator(NullLocator())


def _name(figure: Figure, axes: Axes, points: list[_Point], column: int) -> None:
    """Label the last column's points without overlaps, farthest from the line first; equal points have one label."""
    figure.draw_without_rendering()  # computes positions and sizes
    to_pixels = axes.transData.transform
    taken = []
    for point in points:
        x, y = to_pixels((point.published, point.reproduced))
        taken.append(Bbox.from_extents(x - 4, y - 4, x + 4, y + 4))
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    here: dict[tuple[float, float], list[_Point]] = {}
    for point in sorted((each for each in points if each.column == column), key=lambda each: each.title):
        here.setdefault((point.published, point.reproduced), []).append(point)
    for spot, own in sorted(here.items(), key=lambda each: -_distance(each[1][0])):
        text = "\n".join(plain(point.label) for point in own)
        for text_at in _texts(axes, text, spot):
            box = text_at.get_window_extent()
            if _fits(box, axes.get_window_extent(), taken):
                taken.append(box)
                break
            text_at.remove()


def _texts(axes: Axes, text: str, spot: tuple[float, float]) -> Iterator[Annotation]:
    """Yield a label in every place, best first; places where the line of equality crosses it come last."""
    crossed = []
    for place in _PLACES:
        found = _text(axes, text, spot, place)
        if not _crosses(found.get_window_extent(), axes.get_window_extent()):
            yield found
        else:
            found.remove()
            crossed.append(place)
    yield from (_text(axes, text, spot, place) for place in crossed)


def _text(axes: Axes, text: str, spot: tuple[float, float], place: tuple[int, int, str, str]) -> Annotation:
    x, y, horizontal, vertical = place
    return axes.annotate(
        text, spot, xytext=(x, y), textcoords="offset points", ha=horizontal, va=vertical, fontsize=_NAME_POINTS,
        color="#333333", annotation_clip=True, multialignment=horizontal, path_effects=_HALO,
    )  # fmt: skip


def _fits(box: "Bbox", frame: "Bbox", taken: list["Bbox"]) -> bool:
    inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    return inside and not any(box.overlaps(other) for other in taken)


def _crosses(box: "Bbox", frame: "Bbox") -> bool:
    """Return whether the line of equality, the diagonal of a square frame, goes through a box."""
    return bool(box.x0 - frame.x0 < box.y1 - frame.y0 and box.y0 - frame.y0 < box.x1 - frame.x0)


def _distance(point: _Point) -> float:
    return max(point.published / point.reproduced, point.reproduced / point.published)
