"""A run's cuts over time: a table of its repartitions, and a picture of the layers of each stage."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from pipebench.extensions.moves.moves_file import in_words
from pipebench.formats import seconds
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.show.inline import InlineFigure

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # of stages, again after the last


def cuts_markdown(moves: Sequence[RepartitionRecord]) -> str:
    """Return a Markdown table of a run's repartitions, at least one, in order."""
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
    """Return the first minibatch of each layout and the end, and each layout's stage bounds.

    `moves` has at least one repartition, in order; `layers` are the model's names, `end` the run's minibatches.
    """
    place = {name: index for index, name in enumerate(layers)}
    held = [moves[0].was, *(move.cuts for move in moves)]
    ends = [[0, *(place[cut] for cut in cuts), len(layers)] for cuts in held]
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
