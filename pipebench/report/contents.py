"""What the page of a report says, in order: tables, pictures, scores, claims, and how every cell was obtained."""

from collections.abc import Mapping

from pipebench.report.definition import Picture
from pipebench.report.evaluated import Evaluated
from pipebench.report.judgement import claims, scores
from pipebench.report.origins import origins
from pipebench.report.page import Block, Heading, Image, Page, Text, Verbatim
from pipebench.report.tables import tables

PICTURES = "Pictures"  # the heading above them


def page_of(evaluated: Evaluated, drawn: Mapping[Picture, Image]) -> Page:
    """Return the page of a report.

    Args:
        evaluated: the report and its results.
        drawn: what was drawn of the report's pictures.
    """
    report = evaluated.report
    blocks: list[Block] = [*_head(evaluated), *tables(evaluated)]
    pictures = [block for picture in report.pictures for block in _picture(evaluated, picture, drawn)]
    blocks += [Heading(PICTURES), *pictures] if pictures else []
    blocks += [*scores(evaluated), *claims(evaluated), *origins(evaluated)]
    return Page(evaluated.command, report.title, tuple(blocks))


def _head(evaluated: Evaluated) -> list[Block]:
    report = evaluated.report
    told = ", ".join(text for text in (report.paper, report.where) if text)
    parts = [f"Published: {told}." if told else "", evaluated.about.strip()]
    return [Text(part) for part in parts if part]


def _picture(evaluated: Evaluated, picture: Picture, drawn: Mapping[Picture, Image]) -> list[Block]:
    if picture in drawn:
        return [drawn[picture]]
    told = evaluated.report.row(picture.row).title if picture.row else ""
    found = [(run, evaluated.drawings.get((picture.row, run))) for run in picture.runs]
    return [block for run, text in found if text for block in (Text(f"{told}, `{run}`:"), Verbatim(text))]
