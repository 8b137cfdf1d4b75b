"""Curves: a metric of trained runs against epochs, samples or time, a panel each; stars mark the target."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from pipebench.formats import is_share
from pipebench.report.definition import Picture
from pipebench.report.evaluated import Evaluated
from pipebench.report.plot_style import GREY, NORMAL, colour, finish, legend, line_style, plain
from pipebench.train.result import REACHED, Point, RunResult

_WIDTH_IN, _HEIGHT_IN = 4.3, 3.5
_CHARS_PER_IN, _HANDLE_CHARS = 14, 8  # of a legend
_LABELS = {"epochs": "epochs", "samples": "samples", "virtual_time_s": "{clock} time, evaluation included"}


def curves_figure(evaluated: Evaluated, picture: Picture) -> Figure | None:
    """Return the picture; None if no run has a curve."""
    drawn = list(_curves(evaluated, picture))
    if not drawn:
        return None
    figure = Figure(figsize=(_WIDTH_IN * len(picture.over), _HEIGHT_IN), layout="constrained")
    panels = figure.subplots(1, len(picture.over), sharey=True, squeeze=False)[0]
    clocks = " and ".join(sorted({result.clock for _, _, _, results in drawn for result in results}))
    for axes, over in zip(panels, picture.over, strict=True):
        for index, column, label, results in drawn:
            for number, result in enumerate(results):
                _draw(axes, result, picture.metric, over, (colour(index), line_style(column)),
                      label if number == 0 else "")  # fmt: skip
        _draw_targets(axes, [result for *_, results in drawn for result in results], picture.metric)
        axes.set_xlabel(_LABELS[over].format(clock=clocks), fontsize=NORMAL)
        if over == "virtual_time_s":
            axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
        axes.set_xlim(left=0)
        finish(axes)
    panels[0].set_ylabel(picture.metric, fontsize=NORMAL)
    if is_share(picture.metric):
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    longest = max(len(label) for _, _, label, _ in drawn)
    legend(figure, panels[:1], max(1, int(_WIDTH_IN * len(picture.over) * _CHARS_PER_IN / (longest + _HANDLE_CHARS))))
    return figure


def distinct(evaluated: Evaluated, row: str, run: str, metric: str) -> Iterator[tuple[int, str, list[RunResult]]]:
    """Yield a run's results in each column that have points of a metric; equal results of several columns once.

    Yields:
        The column's index; its title after a comma, "" for the first; the results, one per seed.
    """
    seen: list[list[RunResult]] = []
    for number, column in enumerate(evaluated.report.columns):
        results = evaluated.results.get((row, run, column.name), ())
        having = [result for result in results if any(metric in point.metrics for point in result.points)]
        if having and having not in seen:
            yield number, f", {column.title}" if seen else "", having
            seen.append(having)


def _curves(evaluated: Evaluated, picture: Picture) -> Iterator[tuple[int, int, str, list[RunResult]]]:
    """Yield run index, column index, label, and results per seed of every run that has curves.

    Labels are modes, or run names if modes repeat. The run called `way` has its row's title: its mode does not tell
    LARS from plain data parallelism.
    """
    columns = evaluated.report.columns
    modes = {
        (run, evaluated.results[picture.row, run, column.name][0].mode)
        for run in picture.runs
        for column in columns
        if evaluated.results.get((picture.row, run, column.name))
    }
    differ = len({mode for _, mode in modes}) == len(modes) == len({run for run, _ in modes})
    titles = {row.name: row.title for row in evaluated.report.rows}
    for index, run in enumerate(picture.runs):
        for number, where, having in distinct(evaluated, picture.row, run, picture.metric):
            name = having[0].mode if differ else run
            if run == "way":
                name = titles[picture.row]
            yield index, number, plain(f"{name} ({having[0].plan}){where}{_reached(having)}", 72), having


def _reached(results: Sequence[RunResult]) -> str:
    reached = sum(result.outcome == REACHED for result in results)
    if len(results) == 1:
        return "" if reached else f", {results[0].outcome}"
    return f", {reached} of {len(results)} seeds reached"


def _draw(axes: Axes, result: RunResult, metric: str, over: str, look: tuple[str, str], label: str) -> None:
    points = [point for point in result.points if metric in point.metrics]
    at = [_place(point, result, over) for point in points]
    ink, style = look
    axes.plot(
        at, [point.metrics[metric] for point in points], color=ink, linestyle=style, marker="o", markersize=2.5,
        linewidth=1.2, label=label,
    )  # fmt: skip
    reached_s = result.metrics.get("time_to_accuracy_s")
    if result.outcome == REACHED and reached_s is not None:
        met = next((point for point in points if point.clock_s >= reached_s * (1 - 1e-9)), None)
        if met is not None:
            axes.plot(_place(met, result, over), met.metrics[metric], color=ink, marker="*", markersize=11)


def _place(point: Point, result: RunResult, over: str) -> float:
    if over == "virtual_time_s":
        return point.clock_s
    metrics = result.metrics
    # An epoch's time is its samples over the throughput, so the product is the samples of an epoch.
    samples = metrics["throughput_samples_per_s"] * metrics["epoch_time_s"] if over == "epochs" else 1.0
    return point.samples / samples


def _draw_targets(axes: Axes, results: Sequence[RunResult], metric: str) -> None:
    targets = {
        float(result.recipe["train.target.value"])
        for result in results
        if result.recipe.get("train.target.metric") == metric
    }
    for target in sorted(targets):
        axes.axhline(target, color=GREY, linewidth=0.8, linestyle=":")
