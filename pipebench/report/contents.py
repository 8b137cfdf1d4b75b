"""Contents of a report's page in order: tables, pictures, scores, claims, and the origin of every cell."""

from collections.abc import Mapping, Sequence

from pipebench.formats import UNKNOWN, percent
from pipebench.report.definition import Picture, PublishedClaim
from pipebench.report.evaluated import Evaluated, Verdict
from pipebench.report.origins import origins
from pipebench.report.tables import tables
from pipebench.report.wording import published_number
from pipebench.show.page import Block, Heading, Image, Page, RenderedTable, Text, Verbatim

PICTURES = "Pictures"  # the heading above them


def page_of(evaluated: Evaluated, drawn: Mapping[Picture, Image | Text]) -> Page:
    """Return the page of a report; `drawn` are its plots, or a word for each."""
    report = evaluated.report
    blocks: list[Block] = [*_head(evaluated), *tables(evaluated)]
    pictures = [block for picture in report.pictures for block in _picture(evaluated, picture, drawn)]
    blocks += [Heading(PICTURES), *pictures] if pictures else []
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
    """Return what counts as holding: a published number and how near is near enough, or the claim's own words."""
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
