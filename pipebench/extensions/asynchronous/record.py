"""Records the order of an asynchronous server's updates, and their staleness: as files, a table and a picture."""

from collections.abc import Mapping
from dataclasses import replace

from matplotlib.ticker import MaxNLocator

from pipebench.extensions.asynchronous.pushes import FILE_NAME, histogram, to_text
from pipebench.formats import percent
from pipebench.run.drawings import record_drawn
from pipebench.show.inline import InlineFigure, writes
from pipebench.tracking.run_log import RunLog
from pipebench.train.job import Job
from pipebench.train.result import RunResult


def record(log: RunLog, result: RunResult, _: Job) -> RunResult:
    """Record the order of pushes and their staleness; return the result without the order."""
    if not result.pushes:
        return result
    counts = histogram(result.pushes)
    log.text(FILE_NAME, to_text(result.pushes))
    log.text("staleness.md", staleness_markdown(counts))
    record_drawn(log, {"staleness.png": writes(staleness_figure, counts)}, "staleness")
    return replace(result, pushes=())


def staleness_markdown(counts: Mapping[int, int]) -> str:
    """Return a Markdown table of the number of minibatches by staleness, given these counts."""
    total = sum(counts.values())
    lines = ["| updates made meanwhile | minibatches | share |", "| ---: | ---: | ---: |"]
    lines += [f"| {updates} | {count:,} | {percent(count / total)} |" for updates, count in sorted(counts.items())]
    return "\n".join(lines) + "\n"


def staleness_figure(counts: Mapping[int, int]) -> InlineFigure:
    """Return a bar chart of the number of minibatches by staleness."""
    figure = InlineFigure(6.0, 3.2)
    axes = figure.add_subplot()
    axes.bar(list(counts), list(counts.values()), color="#0072B2", width=0.8)
    axes.set_xlabel("staleness: updates made between a minibatch's pull and its push")
    axes.set_ylabel("minibatches")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    return figure
