"""Figures that can be written to files and shown by a notebook.

IPython shows matplotlib's own figures only if pyplot is in use.
"""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DOTS_PER_INCH = 110


class InlineFigure(Figure):
    """A matplotlib figure that IPython can show; `made_by` is written into its file as its origin."""

    def __init__(self, width_in: float, height_in: float, made_by: str | None = None) -> None:
        super().__init__(figsize=(width_in, height_in), layout="constrained")
        self.made_by = made_by

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a PNG."""
        self.set_dpi(_DOTS_PER_INCH)
        # Not `savefig`: it would draw everything twice, the first time only for the layout.
        metadata = None if self.made_by is None else {"Software": self.made_by}
        FigureCanvasAgg(self).print_png(path, metadata=metadata)  # type: ignore[no-untyped-call]

    def _repr_png_(self) -> bytes:
        with io.BytesIO() as file:
            self.savefig(file, format="png", dpi=80)
            return file.getvalue()


def writes(figure: Callable[..., InlineFigure], *of: Any) -> Callable[[Path], None]:
    """Return a function that draws `figure(*of)` and writes it to a path."""
    return lambda path: draw(figure, of, path)


def draw(figure: Callable[..., InlineFigure], of: Sequence[Any], path: Path) -> None:
    """Draw `figure(*of)` and write it to a path; tests replace this function."""
    figure(*of).write(path)
