"""The answer of a command as one object for the shell, scripts and notebooks: text, JSON, rows and pictures."""

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    import pandas

_WIDTH = 110  # columns
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class Shown(ABC):
    """An answer: its `repr` is the command's output, `to_dict()` the command's output with `--json`."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the answer's table, numbers unrounded: a mapping per row."""

    @abstractmethod
    def print_to(self, console: Console) -> None:
        """Print the command's output."""

    def frame(self) -> "pandas.DataFrame":
        """Return `rows` as a pandas frame."""
        import pandas  # late: takes half a second

        return pandas.DataFrame(self.rows())

    def __repr__(self) -> str:
        file = io.StringIO()  # plain: ipykernel's environment would ask rich for colours, which text can't show
        self.print_to(Console(file=file, highlight=False, width=_WIDTH, force_terminal=False, force_jupyter=False))
        return file.getvalue().strip("\n")

    def _repr_html_(self) -> str:
        options: dict[str, Any] = {"force_terminal": True, "force_jupyter": False, "record": True}
        console = Console(file=io.StringIO(), highlight=False, width=_WIDTH, **options)
        self.print_to(console)
        return console.export_html(inline_styles=True, code_format=_PAGE)
