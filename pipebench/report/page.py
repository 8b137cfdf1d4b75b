"""A page as data: what `contents` says of a report, and what `markdown` and `html` write in their own ways.

All texts are Markdown: of one line in tables and headings, of several paragraphs in `Text`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PageLink:
    """The record of a run.

    Attributes:
        text: what to click on.
        told: more about it, for who asks.
        experiment_id: MLflow's; "" where the run isn't known there.
        run_id: likewise.
    """

    text: str
    told: str
    experiment_id: str
    run_id: str


@dataclass(frozen=True)
class PageEntry:
    """One cell of a table.

    Attributes:
        text: what it says.
        links: the runs it rests on; only a page that can be clicked through shows them.
    """

    text: str
    links: tuple[PageLink, ...] = ()


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
    """A table.

    Attributes:
        headings: of its columns.
        rows: as many entries as there are headings in each.
        left: how many columns, from the first on, hold words and not numbers.
        long: whether it is for looking up; a page may fold it away.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[PageEntry, ...], ...]
    left: int = 1
    long: bool = False


@dataclass(frozen=True)
class Image:
    """A picture.

    Attributes:
        name: of its files, without their suffix.
        told: what it shows, for who can't see it.
    """

    name: str
    told: str


@dataclass(frozen=True)
class Verbatim:
    """Text whose lines and blanks count, such as a drawn pipeline."""

    text: str


Block = Heading | Text | RenderedTable | Image | Verbatim


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        command: the command line that makes it.
        title: of all of it.
        blocks: what it says, in order.
    """

    command: str
    title: str
    blocks: tuple[Block, ...]
