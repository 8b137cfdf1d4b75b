"""Records a run's moves of layers: as a file, a table and pictures."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from pipebench.extensions.moves.planned import under
from pipebench.extensions.moves.recipe import FILE_NAME, in_words, to_text
from pipebench.formats import seconds
from pipebench.model.plan_layers import form_of
from pipebench.run.drawings import record_drawn
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.show.inline import InlineFigure, writes
from pipebench.show.pictures import axis_unit
from pipebench.tracking.run_log import RunLog
from pipebench.train.job import Job
from pipebench.train.result import Point, RunResult

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # of stages, again after the last
RATE, SENT, MOVED = "throughput_samples_per_s", "comm_bytes_per_s", "migration_bytes_per_s"  # metrics of points
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#999999"


def record(log: RunLog, result: RunResult, job: Job) -> RunResult:
    """Record the moves of a run, and the plan after the last; return the result without the moves."""
    if not result.moves:
        return result
    layers = [layer.name for layer in job.setup.graph.layers]
    log.text(FILE_NAME, to_text(result.moves))
    log.text("plan-last.json", form_of(under(job.setup, result.moves), layers).text())
    log.text("cuts.md", cuts_markdown(result.moves))
    drawings: dict[str, Callable[[Path], None]] = {
        "cuts.png": writes(cuts_figure, result.moves, layers, job.periods.total)
    }
    if result.points and all({RATE, SENT, MOVED} <= point.metrics.keys() for point in result.points):
        drawings["moves.png"] = writes(moves_figure, result.points, result.moves)
    record_drawn(log, drawings, "cuts over time")
    return replace(result, moves=())


def cuts_markdown(moves: Sequence[RepartitionRecord]) -> str:
    """Return a Markdown table of a run's moves, at least one, in order."""
    lines = [
        "| minibatch | stages begin at | before | layers that don't keep | why | how | standing still |",
        "| ---: | --- | --- | --- | --- | --- | ---: |",
    ]
    for move in moves:
        how = "while training went on" if move.live else "at a drain"
        cuts, was = ", ".join(move.cuts), ", ".join(move.was)
        cells = (f"{move.minibatch:,}", cuts, was, in_words(move.memory), move.why, how, seconds(move.stall_s))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cuts_over_time(
    moves: Sequence[RepartitionRecord], layers: Sequence[str], end: int
) -> tuple[list[int], list[list[int]]]:
    """Return when cuts changed, and the cuts in between.

    Args:
        moves: a run's moves, at least one, in order.
        layers: names of the model's layers, in order.
        end: minibatches of the run.

    Returns:
        The first minibatch under each layout and, last, the end of the run; and for each layout the index of the first
        layer of every stage and, last, the number of layers.
    """
    index = {name: number for number, name in enumerate(layers)}
    all_cuts = [moves[0].was, *(move.cuts for move in moves)]
    ends = [[0, *(index[cut] for cut in cuts), len(layers)] for cuts in all_cuts]
    return [0, *(move.minibatch for move in moves), max(end, moves[-1].minibatch)], ends


def cuts_figure(moves: Sequence[RepartitionRecord], layers: Sequence[str], end: int) -> InlineFigure:
    """Return a picture of the layers of every stage over a run's minibatches; arguments as `cuts_over_time`."""
    times, ends = cuts_over_time(moves, layers, end)
    figure = InlineFigure(7.0, 3.6)
    axes = figure.add_subplot()
    steps = np.array([*ends, ends[-1]])
    for stage in range(steps.shape[1] - 1):
        axes.fill_between(
            times, steps[:, stage], steps[:, stage + 1], step="post", color=_COLOURS[stage % len(_COLOURS)],
            label=f"stage {stage}", linewidth=0,
        )  # fmt: skip
    axes.set_xlabel("minibatches")
    axes.set_ylabel("layers, in order of execution")
    axes.set_xlim(0, times[-1] or 1)
    axes.set_ylim(len(layers), 0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def until_settled_s(points: Sequence[Point], moves: Sequence[RepartitionRecord]) -> float:
    """Return the end of the picture in seconds: 1.5 times the end of the last transfer, or the run's end if earlier."""
    moving = [point.clock_s for point in points if point.clock_s <= moves[-1].clock_s or point.metrics[MOVED]]
    return min(points[-1].clock_s, 1.5 * max(moving, default=points[-1].clock_s))


def moves_figure(points: Sequence[Point], moves: Sequence[RepartitionRecord]) -> InlineFigure:
    """Return a picture of samples per second and, below, of bytes per second: of passes, and of layers that move.

    Each of `points` has the rates since the point before it; `moves` has at least one move, in order.
    """
    end_s = until_settled_s(points, moves)
    scale_s, unit = axis_unit(end_s)
    edges = [0.0, *(point.clock_s / scale_s for point in points)]
    figure = InlineFigure(9.0, 4.8)
    above, below = figure.subplots(2, 1, sharex=True)
    above.stairs([point.metrics[RATE] for point in points], edges, color=_BLUE, baseline=None)
    above.set_ylabel("samples/s")
    for metric, colour, label in ((SENT, _GREY, "activations and gradients"), (MOVED, _ORANGE, "layers that move")):
        rates = [point.metrics[metric] / 1e6 for point in points]
        below.stairs(rates, edges, color=colour, baseline=None, label=label)
    below.set_ylabel("sent by all workers [MB/s]")
    below.set_xlabel(f"time since the start [{unit}]; dotted: the first minibatch under new cuts begins")
    below.legend(frameon=False, loc="best")
    for axes in (above, below):
        for move in moves:
            axes.axvline(move.clock_s / scale_s, color=_GREY, linestyle=":", linewidth=1)
        axes.set_xlim(0, end_s / scale_s)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
