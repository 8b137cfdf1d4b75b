"""Memory over time as an image: every worker's memory by kind, with its device's limit."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from pipebench.formats import num_bytes, percent
from pipebench.show.inline import InlineFigure
from pipebench.show.over_time import MOST_ROWS, NUM_PARTS, Map, Stacks, map_figure, stacks_figure
from pipebench.show.pictures import axis_unit, explain_colours
from pipebench.simulate import kinds
from pipebench.simulate.memory_meter import Curve, MemoryPeak, MemoryTimeline

MADE_BY = "pipebench memory"
COLOURS: Final = {
    kinds.WEIGHTS: "#0072B2",
    kinds.VERSIONS: "#56B4E9",
    kinds.GATHERED: "#882255",
    kinds.MOVED: "#000000",
    kinds.MASTERS: "#999999",
    kinds.STATE: "#009E73",
    kinds.GRADIENTS: "#D55E00",
    kinds.ACTIVATIONS: "#E69F00",
    kinds.AGAIN: "#F0E442",
    kinds.WORKSPACES: "#44AA99",
    kinds.SENT: "#CC79A7",
    kinds.RECEIVED: "#E8C4D8",
}
_ROOMY = 2.5  # a limit of so many times the highest peak is not drawn, as the scale would hide the values
_BARS_IN, _PART_IN, _MOST_NAMES = 12.0, 2.0, 16
_UNITS: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def memory_figure(memory: MemoryTimeline) -> InlineFigure:
    """Return a picture of memory over time: a row per worker; for many workers the fullest one's above a map of all."""
    highest, limit = memory.fullest.num_bytes or 1, memory.limit_bytes
    scale, unit = _unit_of(highest)
    is_drawn = limit is not None and limit < _ROOMY * highest
    top = 1.15 * max(highest, *memory.host_peaks, limit if is_drawn and limit is not None else 0) / scale
    few = len(memory.curves) <= MOST_ROWS
    shown = range(len(memory.curves)) if few else [memory.fullest.worker]
    stacks = Stacks(
        worker_names=[memory.worker_names[worker] for worker in shown],
        heights=np.stack([_stack(memory.curves[worker], memory.end_s) for worker in shown]) / scale,
        colours=COLOURS,
        end_s=memory.end_s or 1.0,
        top=top,
        unit=unit,
        title=_title(memory, is_drawn=is_drawn),
        notes=[_note(memory, worker) for worker in shown],
    )
    if few:
        figure, every = stacks_figure(stacks, MADE_BY)
    else:
        totals = np.stack([_totals(curve, memory.end_s) for curve in memory.curves]) / scale
        values = Map(memory.worker_names, totals, f"all kinds together [{unit}]", highest / scale)
        figure, every = map_figure(stacks, values, MADE_BY)
    for place, worker in enumerate(shown):
        _mark(every[place], memory, worker, scale, limit if is_drawn else None)
        _draw_host(every[place], memory.curves[worker], memory.end_s, scale)
    return figure


def peaks_figure(parts: Mapping[str, Sequence[MemoryPeak]], memory: MemoryTimeline) -> InlineFigure:
    """Return a picture of workers' peak memory: a row per part of the run, with a bar per worker.

    Args:
        parts: every worker's peak, by part of the run.
        memory: of any part; for the workers' names and the limit.
    """
    limit, names = memory.limit_bytes, memory.worker_names
    most = max(peak.num_bytes for row in parts.values() for peak in row)
    scale, unit = _unit_of(most or 1)
    figure = InlineFigure(_BARS_IN, 1.3 + _PART_IN * len(parts), MADE_BY)
    every = figure.subplots(len(parts), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (part, peaks) in zip(every, parts.items(), strict=True):
        bottom = np.zeros(len(peaks))
        for kind, colour in COLOURS.items():
            heights = np.array([peak.by_kind.get(kind, 0) for peak in peaks]) / scale
            axes.bar(range(len(peaks)), heights, bottom=bottom, color=colour, width=0.8)
            bottom += heights
        fullest = max(peaks, key=lambda peak: peak.num_bytes)
        peak = f"{part}: {num_bytes(fullest.num_bytes)} at most, on {names[fullest.worker]}"
        axes.set_title(f"{peak}, {fullest.when}", loc="left", fontsize=9, pad=3)
        if limit is not None and limit < _ROOMY * most:
            _draw_limit(axes, limit / scale)
        axes.set_ylabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
    step = -(-len(names) // _MOST_NAMES)
    every[-1].set_xticks(range(0, len(names), step), names[::step], fontsize=8)
    shown = [kind for kind in COLOURS if any(peak.by_kind.get(kind) for row in parts.values() for peak in row)]
    explain_colours(figure, {kind: COLOURS[kind] for kind in shown})
    return figure


def _unit_of(num_bytes: int) -> tuple[float, str]:
    """Return the largest unit of which there is at least one: its bytes and its name."""
    return next((scale, unit) for scale, unit in _UNITS if num_bytes >= scale)


def _draw_limit(axes: Axes, height: float) -> None:
    axes.axhline(height, color="#333333", linestyle="--", linewidth=1.0)


def _mark(axes: Axes, memory: MemoryTimeline, worker: int, scale: float, limit: int | None) -> None:
    """Draw the device's limit, and a mark where the worker first exceeds it."""
    if limit is not None:
        _draw_limit(axes, limit / scale)
    found = memory.overflow
    if found is not None and found.worker == worker:
        moment = found.time_s / axis_unit(memory.end_s)[0]
        axes.plot(moment, found.num_bytes / scale, marker="X", color="#D55E00", markersize=9, markeredgecolor="white")


def _draw_host(axes: Axes, curve: Curve, end_s: float, scale: float) -> None:
    """Draw memory on the host, if any, as a line, since the stacked areas show the device."""
    if curve.host_bytes.any():
        lasts = np.append(np.diff(curve.times_s) > 0, True)  # of several changes at one moment, only the last
        times_s = np.append(curve.times_s[lasts], end_s) / axis_unit(end_s)[0]
        on_host = np.append(curve.host_bytes[lasts], curve.host_bytes[-1]) / scale
        axes.step(times_s, on_host, where="post", color="#333333", linestyle=":", linewidth=1.2, label=kinds.ON_HOST)


def _title(memory: MemoryTimeline, *, is_drawn: bool) -> str:
    limit, peak = memory.limit_bytes, memory.fullest.num_bytes
    if limit is None:
        return f"simulated: {num_bytes(peak)} at most on a worker"
    parts = [f"simulated: {num_bytes(peak)} at most on a worker, {percent(peak / limit)} of {num_bytes(limit)}"]
    parts += ["dashed: what a device has"] * is_drawn
    parts += ["out of memory at the X"] * (memory.overflow is not None)
    return "; ".join(parts)


def _note(memory: MemoryTimeline, worker: int) -> str:
    peak, host = memory.peaks[worker], memory.host_peaks[worker]
    swapped = f"; dotted: on its host, {num_bytes(host)} at most" if host else ""
    return f"{num_bytes(peak.num_bytes)} at most, {peak.when}{swapped}"


def _stack(curve: Curve, end_s: float) -> NDArray[np.float64]:
    """Return the bytes at the fullest moment of each part of the time: [kind, part of the time]."""
    totals = curve.num_bytes.sum(axis=0)
    found = np.zeros((len(kinds.KINDS), NUM_PARTS))
    for part, (start, stop) in enumerate(_moments(curve, end_s)):
        if stop > start:
            found[:, part] = curve.num_bytes[:, start + int(totals[start:stop].argmax())]
    return found


def _totals(curve: Curve, end_s: float) -> NDArray[np.float64]:
    """Return the largest sum of bytes over all kinds in each part of the time: [part of the time]."""
    totals = curve.num_bytes.sum(axis=0)
    return np.array([totals[start:stop].max() if stop > start else 0 for start, stop in _moments(curve, end_s)])


def _moments(curve: Curve, end_s: float) -> Sequence[tuple[int, int]]:
    """Return, for every part of the time, the range of indices of the curve's values in it, the stop excluded."""
    edges_s = np.linspace(0.0, end_s or 1.0, NUM_PARTS + 1)
    # Of several changes at one moment, only the last counts.
    # A part begins with the value of the last change before it.
    before = np.maximum(np.searchsorted(curve.times_s, edges_s[:-1], side="right") - 1, 0)
    after = np.searchsorted(curve.times_s, edges_s[1:], side="left")
    return [(int(a), int(max(a + 1, b)) if len(curve.times_s) else int(a)) for a, b in zip(before, after, strict=True)]
