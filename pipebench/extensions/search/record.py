"""Records an architecture search: its history as a file, a table of individuals, and a picture over the run's clock."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.ticker import MaxNLocator

from pipebench.extensions.search.trace_file import FILE_NAME, SearchFile
from pipebench.formats import measure, seconds
from pipebench.run.drawings import record_drawn
from pipebench.show.inline import InlineFigure, writes
from pipebench.show.pictures import axis_unit
from pipebench.tracking.run_log import RunLog
from pipebench.train.job import Job
from pipebench.train.result import Point, RunResult
from pipebench.typed_json import write

_RATE = "throughput_samples_per_s"
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#999999"


def record(log: RunLog, result: RunResult, _: Job) -> RunResult:
    """Record a search's history as file, table and picture; return the result without it."""
    found: SearchFile | None = result.search
    if found is None:
        return result
    log.text(FILE_NAME, write(found))
    log.text("search.md", search_markdown(found))
    end_s = result.metrics["total_time_s"]
    record_drawn(log, {"search.png": writes(search_figure, found, result.points, end_s)}, "the search")
    return replace(result, search=None)


def search_markdown(found: SearchFile) -> str:
    """Return a Markdown table of all individuals, the fittest in bold."""
    title = found.metric or "score"
    lines = [f"| individual | parent | changed | cells | layers | from | {title} |"]
    lines.append("| ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for each in found.individuals:
        changed = ", ".join(f"{'+' if name in each.cells else '-'}{name}" for name in each.changed)
        scores = ", ".join(measure(found.metric, score) for score in each.scores)
        number = f"**{each.number}**" if each.number == found.best else str(each.number)
        parent = "" if each.parent is None else str(each.parent)
        cells = f"| {number} | {parent} | {changed} | {len(each.cells)} | {each.layers} "
        lines.append(f"{cells}| {seconds(each.second)} | {scores} |")
    return "\n".join(lines) + "\n"


def search_figure(found: SearchFile, points: Sequence[Point], end_s: float) -> InlineFigure:
    """Return a picture of active layers over time and, below, of scores, or of throughput if nothing was trained.

    `points` are the run's evaluations, or the simulation's periods; `end_s` is the end of the run.
    """
    scale_s, unit = axis_unit(end_s)
    figure = InlineFigure(9.0, 4.8)
    above, below = figure.subplots(2, 1, sharex=True)
    edges = [*(each.second / scale_s for each in found.individuals), end_s / scale_s]
    above.stairs([each.layers for each in found.individuals], edges, color=_BLUE, baseline=None)
    above.set_ylabel("active layers")
    above.yaxis.set_major_locator(MaxNLocator(integer=True))
    best = next((each for each in found.individuals if each.number == found.best), None)  # None before an evaluation
    if found.metric and best is None:
        below.set_ylabel(found.metric)
    elif best is not None:
        scores = [(point.clock_s / scale_s, point.metrics[found.metric]) for point in points]
        below.plot(*zip(*scores, strict=True), ".", color=_GREY, label="every evaluation")
        below.axhline(best.scores[-1], color=_ORANGE, linewidth=1, label=f"the fittest, individual {best.number}")
        below.legend(frameon=False, loc="lower right")
        below.set_ylabel(found.metric)
    else:
        rates = [point.metrics[_RATE] for point in points]
        below.stairs(rates, edges, color=_ORANGE, baseline=None)
        below.set_ylim(bottom=0)
        below.set_ylabel("samples/s")
    below.set_xlabel(f"time since the start [{unit}]")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
