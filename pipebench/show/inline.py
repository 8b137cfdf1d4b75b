"""A figure that a notebook shows; IPython shows matplotlib's own only where pyplot is in use."""

import io

from matplotlib.figure import Figure


class InlineFigure(Figure):
    """matplotlib's figure, which IPython can show."""

    def _repr_png_(self) -> bytes:
        with io.BytesIO() as file:
            self.savefig(file, format="png", dpi=80)
            return file.getvalue()
