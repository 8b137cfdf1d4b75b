"""Figures as files, and as what a notebook shows; IPython shows matplotlib's own only where pyplot is in use."""

import io
import os

from matplotlib.figure import Figure

_DOTS_PER_INCH = 110


class InlineFigure(Figure):
    """matplotlib's figure, which IPython can show."""

    def write(self, path: str | os.PathLike[str], software: str | None = None) -> None:
        """Write a PNG; `software` is kept in it as its origin."""
        self.set_dpi(_DOTS_PER_INCH)
        layout = self.get_layout_engine()
        if layout is not None:
            # Laid out here, once: `savefig` would draw everything an extra time for it.
            layout.execute(self)
            self.set_layout_engine("none")
        self.savefig(path, format="png", metadata=None if software is None else {"Software": software})

    def _repr_png_(self) -> bytes:
        with io.BytesIO() as file:
            self.savefig(file, format="png", dpi=80)
            return file.getvalue()
