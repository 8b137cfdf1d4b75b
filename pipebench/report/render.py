"""Render a report: Markdown and PNG to keep, of what is reproducible; an HTML page and SVG to view."""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipebench.files import FileError, read_text
from pipebench.files import replace as replace_file
from pipebench.report import contents
from pipebench.report.definition import PICTURES
from pipebench.report.evaluated import Evaluated
from pipebench.report.plots import draw_plots, undrawn
from pipebench.report.tables import tables
from pipebench.report.values import VALUES, values_of, write_values
from pipebench.show.html import html
from pipebench.show.page import Block, Cell, Heading, Image, LinkedText, Page, RenderedTable, Text, Verbatim

MARKDOWN, HTML = "report.md", "report.html"


@dataclass(frozen=True)
class Rendered:
    """The files of a rendered report."""

    files: tuple[Path, ...]  # all that were written
    pictures: tuple[Path, ...]  # the PNGs among them, in order
    removed: tuple[Path, ...]  # pictures of an earlier rendering that are no longer shown
    undrawn: tuple[str, ...]  # a sentence per picture that has no value to draw
    summary: str  # Markdown of the tables alone


def render(evaluated: Evaluated, folder: Path) -> Rendered:
    """Write a report into a folder, replacing an earlier rendering; raises an OSError on failure."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw_plots(evaluated, folder)
    removed = tuple(leftovers(evaluated.report.name, folder / MARKDOWN, {image.name for image in drawn.values()}))
    missing = undrawn(evaluated, drawn)
    page = contents.page_of(evaluated, {**drawn, **missing})
    texts = {MARKDOWN: markdown(page).encode(), HTML: html(page, folder, evaluated.server).encode()}
    texts[VALUES] = write_values(values_of(evaluated))
    for name, content in texts.items():
        replace_file(folder / name, content)
    for path in removed:
        path.unlink(missing_ok=True)
    pictures = tuple(folder / f"{image.name}.png" for image in drawn.values())
    vectors = tuple(path.with_suffix(".svg") for path in pictures)
    files = (*(folder / name for name in texts), *pictures, *vectors)
    words = tuple(text.markdown for text in missing.values())
    return Rendered(files, pictures, removed, words, blocks_markdown(tables(evaluated)))


# Pictures of an earlier page are removed, but the folder may hold other files (`--out`): only those count that the
# page to be replaced shows, if it is this report's, under names that `plots` gives.
# A page begins with its command, whose first argument is the report's name or file.
_COMMAND = re.compile(r"`pipebench report '?(.+?)'?(?: --.*)?`")
_PICTURE = re.compile(rf"^!\[.*\]\(((?:{'|'.join(PICTURES)})(?:-[^/()]+)?)\.png\)$", re.MULTILINE)


def leftovers(name: str, page: Path, shown: Collection[str]) -> Iterator[Path]:
    """Yield picture files that the existing Markdown `page`, if any, shows and the new one doesn't.

    `name` is the report's; `shown` are the names of pictures, without suffix, on the new page.
    """
    try:
        text = read_text(page)
    except FileError:
        return
    command = _COMMAND.match(text)
    if command is None or Path(command[1]).stem != name:
        return
    pictures = text.partition(f"\n## {contents.PICTURES}\n")[2]
    for picture in dict.fromkeys(_PICTURE.findall(pictures)):
        if picture not in shown:
            files = (page.with_name(f"{picture}.{kind}") for kind in ("png", "svg"))
            yield from (path for path in files if path.is_file())


def markdown(page: Page) -> str:
    """Return a page as Markdown, starting with its command."""
    parts = [f"`{page.command}`", f"# {page.title}", blocks_markdown(page.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def blocks_markdown(blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown, without a final newline."""
    return "\n\n".join(_block(block) for block in blocks)


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {text}"
        case Text(text):
            return text
        case Image(name, description):
            return f"![{description}]({name}.png)"
        case Verbatim(text):
            return f"```\n{text}\n```"
        case RenderedTable():
            return _table(block)


def _table(table: RenderedTable) -> str:
    sides = ("---" if index < table.left else "--:" for index in range(len(table.headings)))
    lines = [table.headings, sides, *table.rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(cell: Cell) -> str:
    text = cell.text if isinstance(cell, LinkedText) else cell
    return " ".join(text.split()).replace("|", "\\|")
