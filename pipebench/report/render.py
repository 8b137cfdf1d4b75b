"""A report as files: Markdown and PNG to keep, one HTML page and SVG to look at."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pipebench
from pipebench.files import FileError, read_text
from pipebench.files import replace as replace_file
from pipebench.report import contents
from pipebench.report.definition import PICTURES
from pipebench.report.evaluated import Evaluated
from pipebench.report.html import html
from pipebench.report.markdown import blocks_markdown, markdown
from pipebench.report.plots import draw_plots
from pipebench.report.tables import tables

MARKDOWN, HTML = "report.md", "report.html"


@dataclass(frozen=True)
class Rendered:
    """What became of a report.

    Attributes:
        files: all that was written.
        pictures: of these the PNGs, in the report's order.
        removed: pictures of an earlier rendering that the page doesn't show any more.
        summary: Markdown of the tables alone, as a description of the report.
    """

    files: tuple[Path, ...]
    pictures: tuple[Path, ...]
    removed: tuple[Path, ...]
    summary: str


def render(evaluated: Evaluated, folder: Path) -> Rendered:
    """Write a report into a folder, which is made if it isn't there.

    Args:
        evaluated: the report and its results.
        folder: what it has of an earlier rendering is replaced, and removed where nothing takes its place.

    Raises:
        OSError: the folder takes no file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw_plots(evaluated, folder)
    removed = tuple(leftovers(evaluated.report.name, folder / MARKDOWN, {image.name for image in drawn.values()}))
    page = contents.page_of(evaluated, drawn)
    texts = {MARKDOWN: markdown(page), HTML: html(page, folder, evaluated.server, _footer())}
    for name, text in texts.items():
        replace_file(folder / name, text.encode())
    for path in removed:
        path.unlink(missing_ok=True)
    pictures = tuple(folder / f"{image.name}.png" for image in drawn.values())
    vectors = tuple(path.with_suffix(".svg") for path in pictures)
    files = (*(folder / name for name in texts), *pictures, *vectors)
    return Rendered(files, pictures, removed, blocks_markdown(tables(evaluated)))


def _footer() -> str:
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"Rendered {made} by pipebench {pipebench.__version__}, torch {version('torch')}."


# An earlier page's pictures would stay in a folder that may be anybody's (`--out`). One counts as the report's only
# if the page that is about to be replaced is the report's, too, and shows it, under a name that `plots` gives.
# A report's page begins with the command that made it; of what that takes, the report's name or file comes first.
_COMMAND = re.compile(r"`pipebench report '?(.+?)'?(?: --.*)?`")
_PICTURE = re.compile(rf"^!\[.*\]\(((?:{'|'.join(PICTURES)})(?:-[^/()]+)?)\.png\)$", re.MULTILINE)


def leftovers(name: str, page: Path, shown: Collection[str]) -> Iterator[Path]:
    """Yield the files of pictures that a page shows and that aren't shown any more.

    Args:
        name: the report's.
        page: the page before it is written again, as Markdown; need not exist.
        shown: names of pictures, without their suffix, that it will show.
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
