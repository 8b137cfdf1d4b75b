"""Pictures of runs: the timeline as an image, curves for a comparison, and the pipeline as text.

Figures are made without pyplot, as a library must not change its global state. The colours are Okabe and Ito's, which
colour-blind readers can distinguish.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from pipebench.formats import is_share, seconds
from pipebench.schedule import operations
from pipebench.show.inline import InlineFigure
from pipebench.simulate.timeline import (
    BUFFERS,
    CONTROL,
    EVALUATE,
    EVALUATION,
    PASSES,
    SWAP_KINDS,
    SYNC_KINDS,
    Span,
    Timeline,
    Transfer,
)
from pipebench.train.result import REACHED, RunResult

_SPAN_COLOURS = {
    operations.FORWARD: "#56B4E9",
    operations.BACKWARD: "#E69F00",
    operations.BACKWARD_INPUT: "#E69F00",
    operations.BACKWARD_WEIGHT: "#F0E442",
    operations.UPDATE: "#009E73",
    EVALUATE: "#CC79A7",
    operations.SEND: "#0072B2",
    operations.WAIT: "#E8E8E8",
}
_TRANSFER_COLOURS = {
    operations.ACTIVATION: "#0072B2",
    operations.GRADIENT: "#D55E00",
    **dict.fromkeys(SYNC_KINDS, "#333333"),
    BUFFERS: "#999999",
    EVALUATION: "#CC79A7",
    CONTROL: "#F0E442",
    operations.MIGRATION: "#009E73",
    operations.SWAP_OUT: "#AA4499",
    operations.SWAP_IN: "#332288",
}
CURVE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":")
_STAR = "*"  # marker of the evaluation that reached the target
_AXIS_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))

# A row is one unit high: the worker's boxes above, its transfers in two strips below. Copies to and from the host may
# overlap, so each direction has half of a strip.
_BOX_BOTTOM, _BOX_HEIGHT = -0.18, 0.58
_STRIP_HEIGHT = 0.11
_UPPER_STRIP, _LOWER_STRIP = -0.31, -0.43
_UPPER_KINDS = (operations.ACTIVATION, operations.GRADIENT, EVALUATION)
_BOTTOMS = {**dict.fromkeys(_UPPER_KINDS, _UPPER_STRIP), operations.SWAP_OUT: _LOWER_STRIP + _STRIP_HEIGHT / 2}

_WIDTH_IN, _ROW_IN, _FONT_POINTS = 14.0, 0.62, 7.5
_CHAR_IN = 0.62 * _FONT_POINTS / 72  # mean width of a sans-serif character
_PLOT_IN = 0.88 * _WIDTH_IN  # the rest of the width is for the workers' names


def timeline_figure(timeline: Timeline) -> InlineFigure:
    """Return a picture of a timeline up to `readable_end_s`, with one row per worker."""
    num_workers = len(timeline.worker_names)
    figure = InlineFigure(_WIDTH_IN, 1.35 + _ROW_IN * num_workers)
    axes = figure.add_subplot()
    end_s = readable_end_s(timeline)
    scale_s, unit = axis_unit(end_s)
    spans = [span for span in timeline.spans if span.start_s < end_s]
    transfers = [transfer for transfer in timeline.transfers if transfer.start_s < end_s]
    _draw_spans(axes, spans, scale_s)
    _draw_transfers(axes, transfers, scale_s)
    axes.set_xlim(0, end_s / scale_s)
    axes.set_ylim(num_workers - 0.42, -0.62)
    middles = [worker - _BOX_BOTTOM - _BOX_HEIGHT / 2 for worker in range(num_workers)]
    axes.set_yticks(middles, timeline.worker_names)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(_time_label(timeline, end_s, unit))
    axes.spines[["top", "right", "left"]].set_visible(False)
    _write_labels(axes, spans, end_s, scale_s)
    _add_legend(figure, spans, transfers)
    return figure


def readable_end_s(timeline: Timeline) -> float:
    """Return the end of the part that a picture shows, in seconds.

    It is the timeline's end if most boxes are then wide enough for their numbers, else earlier, but never before every
    worker's first backward: a picture shows the whole fill of the pipeline.
    """
    work = [span for span in timeline.spans if span.kind in PASSES and span.end_s > span.start_s]
    if not work:
        return max((span.end_s for span in timeline.spans), default=0.0) or 1.0
    s_per_inch = sorted((span.end_s - span.start_s) / _text_in(_box_text(span)) for span in work)
    first_backward_s: dict[int, float] = {}
    for span in work:
        if span.kind in (operations.BACKWARD, operations.BACKWARD_INPUT):
            first_backward_s.setdefault(span.worker, span.end_s)
    # A tenth less than what fits the quartile, so that stages of about the same speed all have their numbers.
    readable_s = max(0.9 * s_per_inch[len(work) // 4] * _PLOT_IN, *first_backward_s.values(), 0.0)
    return min(readable_s, max(span.end_s for span in timeline.spans))


def metric_figure(results: Sequence[RunResult], metric: str) -> InlineFigure:
    """Return a picture of a metric against each run's clock; a star marks where a run reached its target."""
    figure = InlineFigure(8.0, 4.6)
    draw_metric(figure.add_subplot(), results, metric)
    return figure


def draw_metric(axes: Axes, results: Sequence[RunResult], metric: str) -> None:
    """Draw a metric against each run's clock."""
    clocks_s = [point.clock_s for result in results for point in result.points if metric in point.metrics]
    scale_s, unit = axis_unit(max(clocks_s, default=1.0))
    recipes = list(dict.fromkeys(result.name for result in results))
    drawn: set[str] = set()
    for result in results:  # the seeds of a recipe share a colour and an entry of the legend
        label = "" if result.name in drawn else _curve_label([each for each in results if each.name == result.name])
        _draw_curve(axes, result, metric, scale_s, recipes.index(result.name), label)
        drawn.add(result.name)
    clocks = sorted({result.clock for result in results})
    star = "; star: target reached" if any(line.get_marker() == _STAR for line in axes.lines) else ""
    axes.set_xlabel(f"{' and '.join(clocks)} time [{unit}], evaluation included{star}")
    axes.set_ylabel(metric)
    if is_share(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False)


def text_picture(timeline: Timeline, unit_s: float | None = None, width: int = 80) -> str:
    """Draw the pipeline as text: a row per worker such as `stage 0 F0 F1 F2 F3 . . B0`, with `.` where it waits.

    If the pipeline is so long that a worker's row would be empty, the picture begins when the last worker begins, which
    a line above it says, or has longer cells.

    Args:
        timeline: of all workers.
        unit_s: seconds per cell, by default `natural_unit_s`.
        width: characters per line at most.
    """
    if not timeline.spans:
        return ""
    unit_s = unit_s or natural_unit_s(timeline)
    starts_s: dict[int, float] = {}
    for span in timeline.spans:
        if span.kind not in (operations.SEND, operations.WAIT):
            starts_s.setdefault(span.worker, span.start_s)
    filled_s = int(max(starts_s.values(), default=0.0) / unit_s) * unit_s
    lines, begin_s = list[str](), 0.0
    # The first of these views in which every worker's row shows work: from the start, from the moment when all workers
    # have begun, from the start in longer cells. If there is none, the first view.
    for since_s, longer in ((0.0, 1), (filled_s, 1), *((0.0, 2**power) for power in range(1, 6))):
        drawn, working = _text_lines(timeline.shifted(-since_s), unit_s, longer, width)
        is_whole = working >= starts_s.keys()
        if is_whole or not lines:
            lines, begin_s = drawn, since_s
        if is_whole:
            break
    since = [f"from {seconds(begin_s)} on, when all stages work"] if begin_s else []
    return "\n".join([*since, *lines])


def _text_lines(timeline: Timeline, unit_s: float, longer: int, width: int) -> tuple[list[str], set[int]]:
    """Return a line per worker, in cells of `longer` units each, and the workers whose lines show work."""
    work = [span for span in timeline.spans if span.kind not in (operations.SEND, operations.WAIT) and span.end_s > 0]
    name_width = max(len(name) for name in timeline.worker_names)
    cell_s = unit_s * longer
    num_cells, cell_width = _cells(work, cell_s, width - name_width - 2)
    num_cells = min(num_cells, _cells_until(max((span.end_s for span in work), default=0.0), cell_s))
    rows = _text_rows(work, len(timeline.worker_names), num_cells, cell_s, unit_s / 3)
    lines = [
        f"{name:<{name_width}}  {''.join(f'{cell:<{cell_width}}' for cell in row)}".rstrip()
        for name, row in zip(timeline.worker_names, rows, strict=True)
    ]
    return lines, {worker for worker, row in enumerate(rows) if {*row} != {"."}}


def natural_unit_s(timeline: Timeline) -> float:
    """Return the shortest median duration over workers of their forwards or backwards, in seconds."""
    durations_s: dict[tuple[int, str], list[float]] = {}
    for span in timeline.spans:
        if span.kind in PASSES and span.end_s > span.start_s:
            durations_s.setdefault((span.worker, span.kind), []).append(span.end_s - span.start_s)
    if not durations_s:
        return max((span.end_s for span in timeline.spans), default=1.0) or 1.0
    return min(sorted(values)[len(values) // 2] for values in durations_s.values())


def _cells(spans: Sequence[Span], unit_s: float, width: int) -> tuple[int, int]:
    """Return the number of cells and their width in characters that show the longest time in `width` characters.

    The picture ends before the first label that is too long for its cell.
    """
    best = (0, 2)
    for cell_width in range(2, 2 + max((len(span.label) for span in spans), default=1)):
        num_cells = (width + 1) // cell_width  # the last cell needs no blank after it
        too_long_s = min((span.start_s for span in spans if len(span.label) >= cell_width), default=None)
        if too_long_s is not None:
            num_cells = min(num_cells, int(too_long_s / unit_s))
        best = max(best, (num_cells, cell_width), key=lambda choice: choice[0])
    return max(1, best[0]), best[1]


def _text_rows(
    spans: Iterable[Span], num_workers: int, num_cells: int, unit_s: float, least_s: float
) -> list[list[str]]:
    rows = [["."] * num_cells for _ in range(num_workers)]
    filled_s = [[0.0] * num_cells for _ in range(num_workers)]
    for span in spans:
        for cell in range(max(0, int(span.start_s / unit_s)), min(num_cells, _cells_until(span.end_s, unit_s))):
            overlap_s = min(span.end_s, (cell + 1) * unit_s) - max(span.start_s, cell * unit_s)
            # A cell shows the span that fills most of it, if that takes at least `least_s`.
            if overlap_s > max(filled_s[span.worker][cell] + 1e-9 * unit_s, least_s):
                filled_s[span.worker][cell] = overlap_s
                # Forwards of evaluations have a letter of their own, as text has no colours.
                rows[span.worker][cell] = span.label.replace("F", "E") if span.kind == EVALUATE else span.label
    return rows


def _cells_until(end_s: float, unit_s: float) -> int:
    return max(1, -int(-(end_s / unit_s - 1e-9) // 1))


def _draw_spans(axes: Axes, spans: Sequence[Span], scale_s: float) -> None:
    groups = defaultdict[tuple[int, str], list[Span]](list)
    for span in spans:
        groups[span.worker, span.kind].append(span)
    for (worker, kind), group in groups.items():
        bars = [(span.start_s / scale_s, (span.end_s - span.start_s) / scale_s) for span in group]
        edge, line = ("none", 0.0) if kind == operations.WAIT else ("white", 0.6)
        axes.broken_barh(
            bars,
            (worker - _BOX_BOTTOM - _BOX_HEIGHT, _BOX_HEIGHT),
            facecolors=_SPAN_COLOURS.get(kind, "#BBBBBB"),
            edgecolors=edge,
            linewidth=line,
            label=f"{kind} {worker}",
        )


def _draw_transfers(axes: Axes, transfers: Sequence[Transfer], scale_s: float) -> None:
    groups = defaultdict[tuple[int, str], list[Transfer]](list)
    for transfer in transfers:
        for worker in transfer.senders:
            groups[worker, transfer.kind].append(transfer)
    for (worker, kind), group in groups.items():
        bars = [(sent.start_s / scale_s, (sent.end_s - sent.start_s) / scale_s) for sent in group]
        height = _STRIP_HEIGHT / 2 if kind in SWAP_KINDS else _STRIP_HEIGHT
        bottom = worker - _BOTTOMS.get(kind, _LOWER_STRIP) - height
        colour = _TRANSFER_COLOURS.get(kind, "#777777")
        axes.broken_barh(bars, (bottom, height), facecolors=colour, linewidth=0, label=f"{kind} {worker}")


def _write_labels(axes: Axes, spans: Sequence[Span], end_s: float, scale_s: float) -> None:
    inches_per_s = _PLOT_IN / end_s
    for span in spans:
        middle_s = (span.start_s + min(span.end_s, end_s)) / 2
        text = _box_text(span)
        if text and (min(span.end_s, end_s) - span.start_s) * inches_per_s >= _text_in(text):
            height = span.worker - _BOX_BOTTOM - _BOX_HEIGHT / 2
            axes.text(
                middle_s / scale_s, height, text, ha="center", va="center", fontsize=_FONT_POINTS, in_layout=False
            )


def _text_in(text: str) -> float:
    return len(text) * _CHAR_IN + 0.03


def _box_text(span: Span) -> str:
    if span.kind in PASSES:
        # The colour tells forwards from backwards. The stage comes first if workers have several: 4F0.1 is 4:0.1.
        return re.sub(r"[A-Za-z]+", ":", span.label).removeprefix(":")
    return "" if span.kind in (operations.SEND, operations.WAIT) else span.label


def _add_legend(figure: InlineFigure, spans: Sequence[Span], transfers: Sequence[Transfer]) -> None:
    span_kinds = {span.kind for span in spans}
    transfer_kinds = {transfer.kind for transfer in transfers}
    meanings = {kind: colour for kind, colour in _SPAN_COLOURS.items() if kind in span_kinds}
    sent = {f"{kind} on its way": colour for kind, colour in _TRANSFER_COLOURS.items() if kind in transfer_kinds}
    explain_colours(figure, meanings | sent)


def explain_colours(figure: InlineFigure, meanings: Mapping[str, str]) -> None:
    """Write a legend of colours in a line above a picture; `meanings` has the colour of each text."""
    if meanings:
        handles = [Patch(color=colour, label=meaning) for meaning, colour in meanings.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=9)


def _time_label(timeline: Timeline, end_s: float, unit: str) -> str:
    last_s = max((span.end_s for span in timeline.spans), default=0.0)
    goes_on = timeline.truncated or last_s > end_s
    numbers = "minibatch.microbatch" if any("." in span.label for span in timeline.spans) else "minibatches"
    if any(span.label[:1].isdigit() for span in timeline.spans):
        numbers = f"stage:{numbers.removesuffix('es')}"
    return f"time since the start [{unit}]; numbers are {numbers}" + ("; the run goes on" if goes_on else "")


def _curve_label(runs: Sequence[RunResult]) -> str:
    """Return the legend's text for a recipe's runs, which differ in their seeds only."""
    first, reached = runs[0], sum(run.outcome == REACHED for run in runs)
    if len(runs) == 1:
        return f"{first.name} ({first.plan})" + ("" if reached else f", {first.outcome}")
    return f"{first.name} ({first.plan}), {reached} of {len(runs)} reached"


def _draw_curve(axes: Axes, result: RunResult, metric: str, scale_s: float, index: int, label: str) -> None:
    points = [(point.clock_s / scale_s, point.metrics[metric]) for point in result.points if metric in point.metrics]
    if not points:
        return
    colour = CURVE_COLOURS[index % len(CURVE_COLOURS)]
    style = LINE_STYLES[(index // len(CURVE_COLOURS)) % len(LINE_STYLES)]
    axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=3, label=label or None)
    reached_s = result.metrics.get("time_to_accuracy_s")
    at_target = [point for point in points if reached_s is not None and point[0] * scale_s >= reached_s * (1 - 1e-9)]
    if result.outcome == REACHED and at_target:
        axes.plot(*at_target[0], color=colour, marker=_STAR, markersize=13, linestyle="none")


def axis_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit of a time axis of this length: its seconds and its name."""
    return next(((scale_s, unit) for scale_s, unit in _AXIS_UNITS if longest_s >= 2 * scale_s), _AXIS_UNITS[-1])
