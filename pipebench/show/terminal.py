"""Consoles of the standard streams, and their width."""

from rich.console import Console, RenderableType
from rich.text import Text

_PLAIN_WIDTH = 110  # columns, if the output is no terminal


def is_terminal() -> bool:
    """Return whether standard output is a terminal that can show a live line."""
    console = Console()
    return console.is_terminal and not console.is_dumb_terminal


def standard_output(*, plain_width: int = _PLAIN_WIDTH) -> Console:
    """Return the console of standard output, as wide as the terminal, or `plain_width` if the output is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=plain_width)


def standard_error() -> Console:
    """Return the console of standard error."""
    return Console(highlight=False, stderr=True)


def print_plain(console: Console, content: RenderableType) -> None:
    """Print; if the output is no terminal, without the blanks that pad lines to the console's width."""
    if console.is_terminal:
        console.print(content)
        return
    with console.capture() as captured:
        console.print(content)
    for line in captured.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)
