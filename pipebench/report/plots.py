"""Write a report's plots: PNG for Markdown, SVG for HTML. Equal numbers give equal bytes."""

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from PIL import Image as Pixels

from pipebench.files import replace as replace_file
from pipebench.report.definition import Picture
from pipebench.report.evaluated import Evaluated
from pipebench.report.plot_bars import bars_figure
from pipebench.report.plot_curves import curves_figure
from pipebench.report.plot_lines import lines_figure
from pipebench.report.plot_phases import phases_figure
from pipebench.report.plot_scatter import scatter_figure
from pipebench.report.plot_stages import stages_figure
from pipebench.show.page import Image, Text

# By kind: the function that draws the plot, and its description.
_PLOTS: Mapping[str, tuple[Callable[[Evaluated, Picture], Figure | None], str]] = {
    "bars": (bars_figure, "every row"),
    "scatter": (scatter_figure, "reproduced against published"),
    "lines": (lines_figure, "along {x}"),
    "curves": (curves_figure, "{metric} as it was trained"),
    "stages": (stages_figure, "{metric} of every stage"),
    "phases": (phases_figure, "{metric} from phase to phase"),
}
_DOTS_PER_INCH = 100
_PALETTE = 128


def draw_plots(evaluated: Evaluated, folder: Path) -> dict[Picture, Image]:
    """Write the plots of a report; return the non-empty ones."""
    drawn: dict[Picture, Image] = {}
    names: set[str] = set()
    for picture in _plots(evaluated):
        figure = _PLOTS[picture.kind][0](evaluated, picture)
        if figure is None:
            continue
        image = Image(_name(picture, names), _description(evaluated, picture))
        names.add(image.name)
        _save(figure, folder / image.name)
        drawn[picture] = image
    return drawn


def undrawn(evaluated: Evaluated, drawn: Mapping[Picture, Image]) -> dict[Picture, Text]:
    """Return a sentence in place of every plot without values, such as a curve of a metric that no run has."""
    return {
        picture: Text(f"No picture of {_description(evaluated, picture)}: nothing has a value for it.")
        for picture in _plots(evaluated)
        if picture not in drawn
    }


def _plots(evaluated: Evaluated) -> list[Picture]:
    return [picture for picture in evaluated.report.pictures if picture.kind in _PLOTS]


def _name(picture: Picture, taken: set[str]) -> str:
    """Return a unique, descriptive name."""
    parts = (picture.kind, *picture.measures, picture.metric, picture.row)
    name = "-".join(part for part in parts if part)
    return next(each for each in (name, *(f"{name}-{n}" for n in range(2, len(taken) + 3))) if each not in taken)


def _description(evaluated: Evaluated, picture: Picture) -> str:
    titles = [evaluated.report.measure(name).title for name in picture.measures]
    where = [evaluated.report.row(picture.row).title] if picture.row else []
    what = _PLOTS[picture.kind][1].format(x=picture.x, metric=picture.metric)
    return ": ".join(filter(None, (", ".join([*titles, *where]), what)))


def _save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG and SVG atomically, without dates and versions."""
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        written = BytesIO()
        # Without a fixed salt the ids inside an SVG are random.
        with mpl.rc_context({"svg.hashsalt": "pipebench"}):
            figure.savefig(written, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
        content = _smaller(written) if kind == "png" else written.getvalue()
        replace_file(path.with_name(f"{path.name}.{kind}"), content)


def _smaller(png: BytesIO) -> bytes:
    """Return a picture with a palette, a third of the bytes."""
    written = BytesIO()
    with Pixels.open(png) as picture:
        picture.convert("RGB").quantize(_PALETTE, dither=Pixels.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()
