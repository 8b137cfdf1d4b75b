"""Stages: a metric of every stage as bars, such as the memory of its fullest worker."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from pipebench.report.definition import Picture
from pipebench.report.evaluated import Evaluated
from pipebench.report.metrics import stage_values
from pipebench.report.plot_style import NORMAL, colour, draw_line, finish, legend, plain, write_values
from pipebench.report.reading import as_title
from pipebench.train.result import RunResult

_STAGE_IN, _LEAST_IN, _HEIGHT_IN = 0.62, 4.6, 2.9
_FULL = 0.84  # of a stage's width
_UNITS = {"_bytes": "bytes", "_s": "s", "_fraction": "share"}  # by suffix of a metric's name


def stages_figure(evaluated: Evaluated, picture: Picture) -> Figure | None:
    """Return the picture of the first column; None if no run has the metric."""
    drawn = [(run, values) for run in picture.runs if (values := _values(evaluated, picture, run))]
    if not drawn:
        return None
    num_stages = max(len(values) for _, values in drawn)
    figure = Figure(figsize=(max(_LEAST_IN, _STAGE_IN * num_stages), _HEIGHT_IN), layout="constrained")
    axes = figure.subplots()
    thick = _FULL / len(drawn)
    for index, (run, values) in enumerate(drawn):
        places = [stage + thick * (index + 0.5) - _FULL / 2 for stage in range(len(values))]
        axes.bar(places, values, thick, color=colour(index), label=plain(picture.word(run)))
    axes.set_title(plain(evaluated.report.row(picture.row).title), fontsize=NORMAL, loc="left")
    draw_line(axes, picture.line)
    axes.set_xticks(range(num_stages))
    axes.set_xlabel("stage", fontsize=NORMAL)
    end, unit = next((pair for pair in _UNITS.items() if picture.metric.endswith(pair[0])), ("", "count"))
    write_values(axes.yaxis, unit)
    axes.set_ylabel(plain(picture.title or as_title(picture.metric.removesuffix(end))), fontsize=NORMAL)
    finish(axes, grid="y")
    legend(figure, [axes], 3)
    return figure


def _values(evaluated: Evaluated, picture: Picture, run: str) -> Sequence[float]:
    first = evaluated.report.columns[0].name
    results: Sequence[RunResult] = evaluated.results.get((picture.row, run, first), ())
    return stage_values(results[0], picture.metric) if results else ()
