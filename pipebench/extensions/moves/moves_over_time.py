"""A run's throughput and traffic while layers move, as a picture with the repartitions marked."""

from collections.abc import Sequence

from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.show.inline import InlineFigure
from pipebench.show.pictures import axis_unit
from pipebench.train.result import Point

RATE, SENT, MOVED = "throughput_samples_per_s", "comm_bytes_per_s", "migration_bytes_per_s"
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#999999"


def until_settled_s(points: Sequence[Point], moves: Sequence[RepartitionRecord]) -> float:
    """Return the end of the picture: 1.5 times the end of the last transfer."""
    through = [point.clock_s for point in points if point.clock_s <= moves[-1].clock_s or point.metrics[MOVED]]
    return min(points[-1].clock_s, 1.5 * max(through, default=points[-1].clock_s))


def moves_figure(points: Sequence[Point], moves: Sequence[RepartitionRecord]) -> InlineFigure:
    """Return a picture of samples per second, below them bytes per second, of passes and of moving layers.

    `points` have these rates since the point before; `moves` has at least one repartition, in order.
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
