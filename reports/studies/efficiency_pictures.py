"""Draws training curves of several modes: a panel per mode, a line per seed, a reference mode's seeds in grey."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

_COLUMNS = 4
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_GREY = "#B0B0B0"
Curve = Sequence[Sequence[float]]  # epochs, virtual seconds, value


def draw(
    curves: Mapping[str, Sequence[Curve]], reference: str, axis: str, metric: str, target: float, path: Path
) -> None:
    """Write a PNG of every mode's curves.

    Args:
        curves: of every seed, by mode.
        reference: the mode that all panels show in grey.
        axis: `epochs` or `virtual time`, the horizontal axis.
        metric: the name of the values, for the vertical axis.
        target: the value that a dashed line marks.
        path: the file.
    """
    column, unit = (0, "epochs") if axis == "epochs" else (1, "virtual time [s]")
    rows = math.ceil(len(curves) / _COLUMNS)
    figure = Figure(figsize=(3.2 * _COLUMNS, 2.3 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(curves) :]:
        panel.axis("off")
    longest = max(curve[-1][column] for each in curves.values() for curve in each)
    for panel, (mode, own) in zip(panels.flat, curves.items(), strict=False):
        panel.axhline(target, color="black", linewidth=0.7, linestyle="--")
        for curve in curves[reference]:
            panel.plot([point[column] for point in curve], [point[2] for point in curve], color=_GREY, linewidth=1.2)
        assert len(own) <= len(_COLOURS)
        for colour, curve in zip(_COLOURS, own, strict=False):
            panel.plot(
                [point[column] for point in curve], [point[2] for point in curve],
                color=_GREY if mode == reference else colour, linewidth=1.4, marker=".", markersize=3,
            )  # fmt: skip
        panel.set_title(f"{mode} (grey everywhere)" if mode == reference else mode, fontsize=9)
        panel.grid(alpha=0.3)
        panel.set_xlim(0, longest * 1.02)
        panel.tick_params(labelsize=8)
    for panel in panels.flat[max(0, len(curves) - _COLUMNS) : len(curves)]:  # nothing is drawn below these
        panel.set_xlabel(unit, fontsize=8)
        panel.tick_params(labelbottom=True)
    for row in panels:
        row[0].set_ylabel(metric, fontsize=8)
    figure.savefig(path, dpi=80)
