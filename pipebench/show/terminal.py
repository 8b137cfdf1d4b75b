"""Where printing goes, and how wide it is there."""

from rich.console import Console, RenderableType
from rich.text import Text

_PLAIN_WIDTH = 110  # where there is no terminal to ask


def is_terminal() -> bool:
    """Return whether standard output is a terminal that can show a live line."""
    console = Console()
    return console.is_terminal and not console.is_dumb_terminal


def standard_output() -> Console:
    """Return where to print: as wide as the terminal, or as a page where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def standard_error() -> Console:
    """Return where to say what doesn't belong to the output."""
    return Console(highlight=False, stderr=True)


def print_plain(console: Console, content: RenderableType) -> None:
    """Print, without the blanks that pad lines to the console's width where the output goes to a file."""
    if console.is_terminal:
        console.print(content)
        return
    with console.capture() as captured:
        console.print(content)
    for line in captured.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)
