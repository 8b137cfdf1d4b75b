"""Render a report: Markdown and PNG, which are reproducible and kept; an HTML page and SVG, to view.

A page has tables, pictures, scores, claims, and the origin of every cell.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipebench.files import FileError, read_text
from pipebench.files import replace as replace_file
from pipebench.formats import UNKNOWN, percent
from pipebench.report.definition import PICTURES, Picture, PublishedClaim
from pipebench.report.evaluated import Evaluated, Verdict
from pipebench.report.origins import origins
from pipebench.report.plots import draw_plots, undrawn
from pipebench.report.tables import tables
from pipebench.report.values import VALUES, values_of, write_values
from pipebench.report.wording import published_number
from pipebench.show.html import html
from pipebench.show.page import Block, Cell, Heading, Image, LinkedText, Page, RenderedTable, Text, Verbatim

MARKDOWN, HTML = "report.md", "report.html"
_PICTURES = "Pictures"  # the heading above them


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
    page = page_of(evaluated, {**drawn, **missing})
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


# Pictures of an earlier page are removed. As the folder may have other files (`--out`), these are only pictures that
# the page to be replaced shows, if it is this report's page, under names as `plots` gives them.
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
    pictures = text.partition(f"\n## {_PICTURES}\n")[2]
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


def page_of(evaluated: Evaluated, drawn: Mapping[Picture, Image | Text]) -> Page:
    """Return the page of a report; `drawn` are its plots, or a text in place of a plot that has nothing to show."""
    report = evaluated.report
    blocks: list[Block] = [*_head(evaluated), *tables(evaluated)]
    pictures = [block for picture in report.pictures for block in _picture(evaluated, picture, drawn)]
    blocks += [Heading(_PICTURES), *pictures] if pictures else []
    blocks += [*scores(evaluated), *claims(evaluated), *origins(evaluated)]
    blocks += [Text(f"Made {evaluated.made}, by `{evaluated.command}`.")] if evaluated.made else []
    return Page(evaluated.command, report.title, tuple(blocks))


def _head(evaluated: Evaluated) -> list[Block]:
    report = evaluated.report
    source = ", ".join(text for text in (report.paper, report.where) if text)
    parts = [f"Published: {source}." if source else "", evaluated.about.strip()]
    return [Text(part) for part in parts if part]


def _picture(evaluated: Evaluated, picture: Picture, drawn: Mapping[Picture, Image | Text]) -> list[Block]:
    if picture in drawn:
        return [drawn[picture]]
    title = evaluated.report.row(picture.row).title if picture.row else ""
    found = [(run, evaluated.drawings.get((picture.row, run))) for run in picture.runs]
    return [block for run, text in found if text for block in (Text(f"{title}, `{run}`:"), Verbatim(text))]


_ABOUT_SCORES = (
    "Over cells with a published value that is no bound: the geometric-mean error is exp(mean abs(ln(reproduced / "
    "published))) - 1, and the rank correlation is Spearman's."
)


def scores(evaluated: Evaluated) -> list[Block]:
    """Return the scores of every column, by measure and set of cells."""
    report = evaluated.report
    columns = {column.name: column.title for column in report.columns}
    rows = [
        (
            report.measure(score.measure).title if score.measure else "numbers in claims",
            columns.get(score.column, f"baseline: {score.column}"),
            score.over,
            f"{score.cells}",
            percent(score.geometric_mean_error),
            UNKNOWN if score.rank_correlation is None else f"{score.rank_correlation:.2f}",
        )
        for score in evaluated.scores
    ]
    if not rows:
        return []
    headings = ("measure", "column", "over", "cells", "geometric-mean error", "rank correlation")
    return [Heading("Scores"), Text(_ABOUT_SCORES), RenderedTable(headings, rows, left=3)]


def claims(evaluated: Evaluated) -> list[Block]:
    """Return a row per claim with its tolerance, a verdict per column and its reason."""
    columns = evaluated.report.columns
    wheres = any(claim.where for claim in evaluated.report.claims)
    tolerances = any(tolerance_text(claim) for claim in evaluated.report.claims)
    rows = []
    for claim in evaluated.report.claims:
        found = {verdict.column: verdict for verdict in evaluated.verdicts if verdict.claim == claim}
        answers = [found.get(column.name, found.get("")) for column in columns]
        why = dict.fromkeys(
            _why(verdict, column.title, answers) for verdict, column in zip(answers, columns, strict=True)
        )
        rows.append((
            claim.text,
            *((claim.where,) if wheres else ()),
            *((tolerance_text(claim),) if tolerances else ()),
            *(UNKNOWN if verdict is None else verdict.answer for verdict in answers),
            "; ".join(each for each in why if each),
        ))  # fmt: skip
    optional = [*(["where"] if wheres else []), *(["tolerance"] if tolerances else [])]
    headings = ("claim", *optional, *(column.title for column in columns), "why")
    return [Heading("Claims"), RenderedTable(headings, rows, left=len(headings))] if rows else []


def tolerance_text(claim: PublishedClaim) -> str:
    """Return when a claim holds: a published number and its tolerance, or the claim's own words."""
    if claim.number is None:
        return claim.tolerance
    number = claim.number
    return f"{published_number(number.published, number.unit)}, within {percent(number.within)}"


def _why(verdict: Verdict | None, title: str, answers: Sequence[Verdict | None]) -> str:
    """Return a verdict's reason, prefixed with the column if reasons differ between columns."""
    if verdict is None or not verdict.reason:
        return ""
    same = len({each.reason for each in answers if each is not None}) == 1
    return verdict.reason if same else f"{title}: {verdict.reason}"
