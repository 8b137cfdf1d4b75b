"""Workers' values over time as an image: stacked, with a row per worker; for many workers a map of one value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from pipebench.show.inline import InlineFigure
from pipebench.show.pictures import axis_unit, explain_colours

MOST_ROWS = 12  # workers that have a row each; if there are more, one row stands above a map of all
NUM_PARTS = 700  # into which the time is divided: about one per two pixels
_WIDTH_IN, _ROW_IN, _STACK_IN, _MAP_IN, _MOST_LABELS = 14.0, 0.95, 2.4, 6.0, 24


@dataclass(frozen=True)
class Stacks:
    """Stacked values of every worker over time."""

    worker_names: Sequence[str]
    heights: NDArray[np.float64]  # [row, label, part of the time]
    colours: Mapping[str, str]  # by label, in the order of stacking
    end_s: float  # when the last part ends; the first begins at 0
    top: float  # upper end of the vertical axes
    unit: str  # of the vertical axes
    title: str
    notes: Sequence[str]  # one per row, at its right end


@dataclass(frozen=True)
class Map:
    """One value of every worker over time."""

    worker_names: Sequence[str]
    values: NDArray[np.float64]  # [worker, part of the time]
    label: str  # the value's name and unit
    top: float  # the value with the darkest colour


def stacks_figure(stacks: Stacks, made_by: str) -> tuple[InlineFigure, Sequence[Axes]]:
    """Return a picture with a row per worker, and its axes."""
    rows = len(stacks.worker_names)
    figure = InlineFigure(_WIDTH_IN, 1.3 + _ROW_IN * rows, made_by)
    every = [*figure.subplots(rows, 1, sharex=True, sharey=True, squeeze=False)[:, 0]]
    for worker, axes in enumerate(every):
        _draw_stack(axes, stacks, worker)
    _finish(figure, every, stacks)
    return figure, every


def map_figure(stacks: Stacks, values: Map, made_by: str) -> tuple[InlineFigure, Sequence[Axes]]:
    """Return a picture of one row above a map of all workers, and its axes, the map's last."""
    figure = InlineFigure(_WIDTH_IN, 1.3 + _STACK_IN + _MAP_IN, made_by)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(_STACK_IN, _MAP_IN))
    _draw_stack(above, stacks, 0)
    count, scale_s = len(values.worker_names), axis_unit(stacks.end_s)[0]
    place = (0.0, stacks.end_s / scale_s, count - 0.5, -0.5)
    image = below.imshow(
        values.values, aspect="auto", extent=place, cmap="cividis", vmin=0, vmax=values.top, interpolation="nearest"
    )
    step = -(-count // _MOST_LABELS)
    below.set_yticks(range(0, count, step), values.worker_names[::step], fontsize=8)
    figure.colorbar(image, ax=below, label=values.label, pad=0.01)
    _finish(figure, (above, below), stacks)
    return figure, (above, below)


def _draw_stack(axes: Axes, stacks: Stacks, worker: int) -> None:
    scale_s, _ = axis_unit(stacks.end_s)
    edges = np.linspace(0.0, stacks.end_s / scale_s, stacks.heights.shape[2] + 1)
    bottom = np.zeros(len(edges))
    for layer, colour in zip(stacks.heights[worker], stacks.colours.values(), strict=True):
        upper = bottom + np.append(layer, layer[-1])  # a step begins at each edge, and the last edge has none
        if layer.any():
            axes.fill_between(edges, bottom, upper, step="post", color=colour, linewidth=0)
        bottom = upper
    axes.set_ylim(0, stacks.top)
    axes.set_xlim(0, edges[-1])
    axes.set_ylabel(stacks.worker_names[worker], rotation=0, ha="right", va="center", fontsize=9)
    axes.yaxis.tick_right()
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "left"]].set_visible(False)
    axes.set_title(stacks.notes[worker], loc="right", fontsize=8, pad=2, y=1.0)


def _finish(figure: InlineFigure, every: Sequence[Axes], stacks: Stacks) -> None:
    _, unit = axis_unit(stacks.end_s)
    every[-1].set_xlabel(f"time since the start [{unit}]; at the right: {stacks.unit}")
    every[0].set_title(stacks.title, loc="left", fontsize=9, pad=4, y=1.0)
    named = enumerate(stacks.colours.items())
    explain_colours(figure, {label: colour for row, (label, colour) in named if stacks.heights[:, row].any()})
