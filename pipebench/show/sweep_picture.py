"""A sweep as a picture: throughput, or time to accuracy, along the swept quantity, where modes' lines may cross."""

import math

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from pipebench.show.inline import InlineFigure
from pipebench.show.pictures import CURVE_COLOURS, axis_unit
from pipebench.show.profile_picture import plain_text
from pipebench.show.sweep_lines import Sweep

_MARKERS = "os^Dv<>PX*"
_MOST_INSIDE = 5  # lines whose legend fits inside the axes
_WIDE = 8.0  # ratio of largest to smallest value above which an axis is logarithmic


def sweep_figure(sweep: Sweep) -> InlineFigure:
    """Return a picture of a sweep, a line per mode."""
    figure = InlineFigure(8.0, 4.6)
    draw_lines(figure.add_subplot(), sweep)
    return figure


def draw_lines(axes: Axes, sweep: Sweep) -> None:
    """Draw a sweep's lines: medians, with a bar from the smallest to the largest value over seeds.

    A point is hollow if some seeds missed the target, and its bar ends at the median. A line is interrupted where half
    or more of the seeds missed it.
    """
    timed = sweep.metric == "time_to_accuracy_s"
    scale, unit = axis_unit(max(_values(sweep), default=1.0)) if timed else (1.0, "")
    for index, (name, line) in enumerate(sweep.lines.items()):
        colour, marker = CURVE_COLOURS[index % len(CURVE_COLOURS)], _MARKERS[index % len(_MARKERS)]
        values = [math.nan if point.value is None else point.value / scale for point in line]
        axes.plot([point.x for point in line], values, color=colour, marker=marker, label=plain_text(name, 60))
        for point, value in zip(line, values, strict=True):
            if point.span is not None:
                ends = [each / scale if math.isfinite(each) else value for each in point.span]
                axes.plot([point.x] * 2, ends, color=colour)
            if point.is_partial:
                axes.plot(point.x, value, color=colour, marker=marker, markerfacecolor="white")
    _finish(axes, sweep)
    axes.set_ylabel(f"time to accuracy [{unit}]" if timed else "samples/s")


def _values(sweep: Sweep) -> list[float]:
    return [point.value for line in sweep.lines.values() for point in line if point.value is not None]


def _finish(axes: Axes, sweep: Sweep) -> None:
    places = {point.x: point.text for line in sweep.lines.values() for point in line}
    values = _values(sweep)
    if min(places, default=0) > 0 and max(places) > _WIDE * min(places):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    is_wide = min(values, default=0) > 0 and max(values) > _WIDE * min(values)
    axes.set_yscale("log" if is_wide else "linear")
    axes.update_datalim([(x, 0.0) for x in places], updatey=not is_wide)  # places without a value belong to the axis
    axes.autoscale_view()
    if not is_wide:
        axes.set_ylim(bottom=0)
    axes.set_xticks(
        list(places), [plain_text(text, 20) for text in places.values()], rotation=30 if len(places) > 6 else 0
    )
    hollow = any(point.is_partial and point.value is not None for line in sweep.lines.values() for point in line)
    axes.set_xlabel(f"{plain_text(sweep.key, 60)}{' (hollow: some seeds missed the target)' if hollow else ''}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(sweep.lines) > _MOST_INSIDE:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8)
    else:
        axes.legend(frameon=False)
