"""Phases: a metric as steps over time, a panel per row, vertical lines where the running layers change.

Runs made of phases have a point at the end of each. Panels share one scale.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, PercentFormatter

from pipebench.report.definition import Picture, Row
from pipebench.report.evaluated import Evaluated
from pipebench.report.plot_curves import distinct
from pipebench.report.plot_style import GREY, NORMAL, colour, draw_line, finish, legend, line_style, plain
from pipebench.report.reading import as_title
from pipebench.train.result import Point, RunResult

_WIDTH_IN, _PANEL_IN, _FRAME_IN = 8.0, 2.5, 0.8
_LAYERS = "active_layers"  # a change starts a new phase


def phases_figure(evaluated: Evaluated, picture: Picture) -> Figure | None:
    """Return the picture; None if no run has points of the metric."""
    drawn = [(row, lines) for row in evaluated.report.rows if (lines := [*_lines(evaluated, picture, row)])]
    if not drawn:
        return None
    figure = Figure(figsize=(_WIDTH_IN, _FRAME_IN + _PANEL_IN * len(drawn)), layout="constrained")
    panels = figure.subplots(len(drawn), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (row, lines) in zip(panels, drawn, strict=True):
        results = [result for *_, result in lines]
        for run, column, label, result in lines:
            index = picture.runs.index(run)
            # Earlier lines are wider, so that a line of equal values does not hide them.
            look: dict[str, str | float] = {"color": colour(index), "linestyle": line_style(column),
                    "linewidth": 1.2 + 1.1 * (len(picture.runs) - 1 - index)}  # fmt: skip
            _draw(axes, result, picture.metric, label, look)
        _draw_bound(axes, results, picture.bound)
        _draw_changes(axes, results)
        axes.set_title(plain(row.title), fontsize=NORMAL, loc="left")
        draw_line(axes, picture.line)
        axes.yaxis.set_major_formatter(_formatter(picture.metric))
        finish(axes)
    panels[0].set_ylim(bottom=0)  # shared by all, so after drawing
    panels[0].set_xlim(left=0)
    panels[-1].set_xlabel("time of the run [s]", fontsize=NORMAL)
    title = picture.title or as_title(picture.metric.replace("_per_s", " per second"))
    figure.supylabel(plain(title), fontsize=NORMAL)
    legend(figure, panels, most=6)
    return figure


def _formatter(metric: str) -> Formatter:
    """Return the axis formatter of a metric, by the unit in its name."""
    if metric.endswith("_fraction"):
        return PercentFormatter(1.0, decimals=0)
    units = {"_bytes_per_s": "B/s", "_bytes": "B", "_s": "s"}
    unit = next((unit for end, unit in units.items() if metric.endswith(end) and "_samples" not in metric), "")
    return EngFormatter(unit=unit)


def _lines(evaluated: Evaluated, picture: Picture, row: Row) -> Iterator[tuple[str, int, str, RunResult]]:
    """Yield run name, column index, label and result of a row's runs; of several seeds only the first."""
    for run in picture.runs:
        for number, where, results in distinct(evaluated, row.name, run, picture.metric):
            yield run, number, plain(f"{picture.word(run)}{where}", 60), results[0]


def _draw(axes: Axes, result: RunResult, metric: str, label: str, look: Mapping[str, str | float]) -> None:
    points = [point for point in result.points if metric in point.metrics]
    values = [point.metrics[metric] for point in points]
    edges = [0.0, *(point.clock_s for point in points)]
    axes.stairs(values, edges, baseline=None, label=label, **look)  # type: ignore[arg-type]


def _draw_bound(axes: Axes, results: Sequence[RunResult], metric: str) -> None:
    """Draw the upper bound of the run whose bound is highest at the end."""
    bounded = [result for result in results if metric in result.points[-1].metrics]
    if bounded:
        highest = max(bounded, key=lambda result: result.points[-1].metrics[metric])
        label = metric.removesuffix("_samples_per_s").replace("_", " ")
        _draw(axes, highest, metric, label, {"color": "black", "linestyle": "--", "linewidth": 1.5})


def _draw_changes(axes: Axes, results: Sequence[RunResult]) -> None:
    """Mark where layers change; changes of several runs within 1 % of the time share a line."""
    times_s = sorted(time_s for result in results for time_s in _changes(result.points))
    end_s = max(result.points[-1].clock_s for result in results)
    last_s = -end_s
    for time_s in times_s:
        if time_s - last_s > 0.01 * end_s:
            axes.axvline(time_s, color=GREY, linewidth=0.8, linestyle=":")
        last_s = time_s


def _changes(points: Sequence[Point]) -> Iterator[float]:
    for before, after in itertools.pairwise(points):
        if before.metrics.get(_LAYERS) != after.metrics.get(_LAYERS):
            yield before.clock_s
