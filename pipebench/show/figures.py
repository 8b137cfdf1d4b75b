"""The figures of answers, in one module that imports matplotlib."""

from collections.abc import Sequence
from functools import partial

from matplotlib.ticker import EngFormatter

from pipebench.show.differences import curves_of
from pipebench.show.inline import InlineFigure
from pipebench.show.pictures import draw_metric, timeline_figure
from pipebench.show.plan_picture import plan_figure
from pipebench.show.profile_picture import profile_figure
from pipebench.show.sweep_lines import sweeps_of
from pipebench.show.sweep_picture import draw_lines
from pipebench.train.result import RunResult

__all__ = ["MADE_BY", "curves_figure", "plan_figure", "profile_figure", "timeline_figure"]

MADE_BY = "pipebench compare"
_WIDTH_IN, _ROW_IN = 8.0, 4.2
# Metrics that every run has, simulated ones too, and their axis labels.
_BARS = (
    ("throughput_samples_per_s", "samples/s"),
    ("comm_bytes_per_sample", "bytes sent per sample"),
    ("peak_memory_bytes_max", "bytes of the fullest worker"),
)


def curves_figure(results: Sequence[RunResult]) -> InlineFigure:
    """Return a panel per sweep over a quantity and per metric with curves; bars for runs that have neither."""
    panels = [partial(draw_lines, sweep=sweep) for sweep in sweeps_of(results)]
    panels += [partial(draw_metric, results=results, metric=metric) for metric in curves_of(results)]
    if not panels:
        return _bars_figure(results)
    figure = InlineFigure(_WIDTH_IN, _ROW_IN * len(panels), MADE_BY)
    for axes, draw in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        draw(axes)
    return figure


def _bars_figure(results: Sequence[RunResult]) -> InlineFigure:
    """Return a panel per metric of `_BARS`, with a bar per run."""
    figure = InlineFigure(1.5 * _WIDTH_IN, 1 + 0.4 * len(results), MADE_BY)
    for axes, (metric, heading) in zip(figure.subplots(1, len(_BARS), sharey=True), _BARS, strict=True):
        axes.barh([result.name for result in results], [result.metrics.get(metric, 0.0) for result in results])
        if metric == _BARS[0][0]:  # the panels share their vertical axis
            axes.invert_yaxis()
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.set_xlabel(heading)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
