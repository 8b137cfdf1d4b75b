"""A page as data: reports and runs make pages, `show.html` and `report.render` render them.

All texts are Markdown: one line in tables and headings, paragraphs in `Text`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PageLink:
    """A link to a run's record."""

    text: str
    tooltip: str
    experiment_id: str  # MLflow's; "" if the run is not recorded
    run_id: str  # MLflow's; "" if the run is not recorded


@dataclass(frozen=True)
class LinkedText:
    """One cell of a table, with links."""

    text: str
    links: tuple[PageLink, ...]  # the runs behind it, in HTML only


Cell = str | LinkedText


@dataclass(frozen=True)
class Heading:
    """The title of a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """Paragraphs or a list."""

    markdown: str


@dataclass(frozen=True)
class RenderedTable:
    """A table."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]  # a cell per heading in each
    left: int = 1  # the first columns have text and are left-aligned; the others have numbers
    long: bool = False  # whether HTML folds the table


@dataclass(frozen=True)
class Image:
    """A picture."""

    name: str  # of its files, without suffix
    description: str  # for readers who can't see it


@dataclass(frozen=True)
class Verbatim:
    """Preformatted text, such as a drawn pipeline."""

    text: str


Block = Heading | Text | RenderedTable | Image | Verbatim


@dataclass(frozen=True)
class Page:
    """A page: the command that makes it, a title and its content in order."""

    command: str
    title: str
    blocks: tuple[Block, ...]
