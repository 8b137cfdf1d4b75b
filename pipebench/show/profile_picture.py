"""A profile as a picture: time, activations and parameters of every layer, above each other.

The colours are those of the timeline: forwards blue, backwards orange.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from pipebench.errors import printable
from pipebench.formats import num_bytes, seconds, shortened
from pipebench.profile.model import LayerProfile, ParameterBytes, Profile
from pipebench.show.inline import InlineFigure
from pipebench.show.profile_report import title

_FORWARD, _BACKWARD, _ACTIVATION, _SAVED, _PARAMETER = "#56B4E9", "#E69F00", "#0072B2", "#D55E00", "#009E73"
MADE_BY = "pipebench profile"
_WIDTH_IN, _HEIGHT_IN = 14.0, 8.0
MOST_LABELS = 64  # of layers, upright, that fit into the width
LABEL_WIDTH = 20  # characters


def profile_figure(profile: Profile, num_samples: int, name: str) -> InlineFigure:
    """Return a picture of the layers of one size."""
    numbered = [(index, row) for index, row in enumerate(profile.layers[num_samples]) if not row.is_input]
    rows = [row for _, row in numbered]
    figure = InlineFigure(_WIDTH_IN, _HEIGHT_IN, MADE_BY)
    time, activation, parameter = figure.subplots(3, 1, sharex=True)
    forward_s, backward_s = [row.forward_s for row in rows], [row.backward_s for row in rows]
    _bars(time, forward_s, _FORWARD, f"forward, {seconds(sum(forward_s))} together")
    _bars(time, backward_s, _BACKWARD, f"backward, {seconds(sum(backward_s))} together", forward_s)
    _bars(activation, [row.output_bytes for row in rows], _ACTIVATION, "output")
    saved = [row.saved_bytes for row in rows]
    # A white line below the coloured one keeps the mark visible in front of a bar.
    for colour, width in (("white", 2.6), (_SAVED, 1.4)):
        label = f"kept for the backward, {num_bytes(sum(saved))} together" if colour == _SAVED else None
        positions = range(len(rows))
        left, right = ([p + side for p in positions] for side in (-0.42, 0.42))
        activation.hlines(saved, left, right, colors=colour, linewidth=width, label=label)
    sizes = [row.parameter_bytes for row in rows]
    _bars(parameter, sizes, _PARAMETER, f"parameters, {num_bytes(ParameterBytes.of(rows).trained)} together")
    for axes, what, unit in ((time, "time", "s"), (activation, "activations", "B"), (parameter, "parameters", "B")):
        _finish_panel(axes, what, unit)
    _label_layers(parameter, numbered)
    model, device = (plain_text(text, 90) for text in (title(name, profile), profile.device))
    figure.suptitle(f"{model}\n{num_samples} samples, times: {profile.source}, device: {device}", fontsize=10)
    return figure


def _bars(axes: Axes, heights: Sequence[float], colour: str, label: str, bottom: Sequence[float] | None = None) -> None:
    width = 0.85 if len(heights) <= 2 * MOST_LABELS else 1.0  # gaps of less than a pixel would only flicker
    axes.bar(range(len(heights)), heights, width, bottom=bottom or 0.0, color=colour, label=label, linewidth=0)


def finish(axes: Axes, what: str, unit: str) -> None:
    """Label the vertical axis, with a grid behind the bars."""
    axes.set_ylabel(what)
    axes.yaxis.set_major_formatter(EngFormatter(unit=unit))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _finish_panel(axes: Axes, what: str, unit: str) -> None:
    finish(axes, what, unit)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, 1.12), ncols=2)


def _label_layers(axes: Axes, rows: Sequence[tuple[int, LayerProfile]]) -> None:
    """Label the layers; in a long model one in every `step`."""
    step = -(-len(rows) // MOST_LABELS)
    positions = range(0, len(rows), step)
    labels = [f"{index} {_label(row)}" for index, row in rows[::step]]
    axes.set_xticks(list(positions), labels, rotation=90, fontsize=7)
    axes.set_xlabel("layers in order of execution" + (f", one in {step} named" if step > 1 else ""))


def _label(row: LayerProfile) -> str:
    """Return the layer's name, or its kind if the name is only a number, as in the PipeDream artifact's files."""
    anonymous = row.name.removeprefix("node").isdecimal()
    return plain_text(row.kind.partition("(")[0].strip("_") if anonymous and row.kind else row.name, LABEL_WIDTH)


def plain_text(text: str, width: int) -> str:
    """Return text in ASCII, which any font can show, with `$` escaped so that matplotlib reads no formula."""
    return shortened(printable(text).encode("ascii", "replace").decode(), width).replace("$", r"\$")
