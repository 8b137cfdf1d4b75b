"""Draws the lab's picture: throughput and time to accuracy over bandwidth, predicted as lines, measured as points."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.lab.findings import Findings, Run, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vP*"


def draw(found: Findings, path: str | os.PathLike[str]) -> None:
    figure(found).savefig(path, dpi=110)


def figure(found: Findings) -> "Figure":
    """Return the picture: one panel, and a second one if there is a target."""
    from matplotlib.figure import Figure

    has_target = any(run.time_to_accuracy_s is not None for run in found.runs)
    made = Figure(figsize=(11.0 if has_target else 6.5, 4.6), layout="constrained")
    panels = made.subplots(1, 2 if has_target else 1, squeeze=False)[0]
    _throughput(panels[0], found)
    if has_target:
        _time_to_accuracy(panels[1], found)
    for axes in panels:
        axes.set_xscale("log")
        ticks = sorted({run.bandwidth_bytes_per_s for run in found.runs})
        axes.set_xticks(ticks, [label(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("bandwidth of every host's wire")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    # Outside of the panels, where its markers would look like measurements.
    handles, names = panels[0].get_legend_handles_labels()
    title = "lines predicted, points measured"
    made.legend(handles, names, frameon=False, loc="outside upper left", ncols=6, title=title, alignment="left")
    return made


def _throughput(axes: "Axes", found: Findings) -> None:
    for index, case in enumerate(found.cases):
        curve = found.curves[case.name]
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot([at for at, _ in curve], [each.throughput_samples_per_s for _, each in curve], color=colour)
        runs = [run for run in (*found.runs, *found.climbed) if run.case == case]
        _points(axes, runs, index, lambda run: run.throughput_samples_per_s, case.name)
    if found.crossing is not None:
        at = found.crossing.bandwidth_bytes_per_s
        axes.axvline(at, color="#999999", linestyle=":", label="predicted crossing")
    axes.set_ylabel("throughput in training [samples/s]")
    axes.set_ylim(bottom=0)


def _time_to_accuracy(axes: "Axes", found: Findings) -> None:
    for index, case in enumerate(found.cases):
        runs = [run for run in found.runs if run.case == case]
        predicted = [(run.bandwidth_bytes_per_s, run.predicted_time_to_accuracy_s) for run in runs]
        line = [(at, wanted) for at, wanted in predicted if wanted is not None]
        axes.plot([at for at, _ in line], [wanted for _, wanted in line], color=_COLOURS[index % len(_COLOURS)])
        _points(axes, runs, index, lambda run: run.time_to_accuracy_s, case.name)
    axes.set_ylabel("time to the target accuracy [s]")
    axes.set_ylim(bottom=0)


def _points(axes: "Axes", runs: Sequence[Run], index: int, value: Callable[[Run], float | None], name: str) -> None:
    found = [(run.bandwidth_bytes_per_s, value(run)) for run in runs]
    known = [(at, each) for at, each in found if each is not None]
    axes.plot(
        [at for at, _ in known], [each for _, each in known], linestyle="none", marker=_MARKERS[index % len(_MARKERS)],
        color=_COLOURS[index % len(_COLOURS)], label=name,
    )  # fmt: skip
