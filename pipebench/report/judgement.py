"""What a report comes to: how near every column is to what was published, and which claims hold."""

from collections.abc import Sequence

from pipebench.formats import UNKNOWN, percent
from pipebench.report.evaluated import Evaluated, Verdict
from pipebench.report.page import Block, Heading, PageEntry, RenderedTable, Text

_ABOUT_SCORES = (
    "Over cells with a published value that is no bound: the geometric-mean error is exp(mean abs(ln(reproduced / "
    "published))) - 1, and the rank correlation is Spearman's."
)


def scores(evaluated: Evaluated) -> list[Block]:
    """Return how near every column comes, by measure and by which cells are counted."""
    report = evaluated.report
    columns = {column.name: column.title for column in report.columns}
    rows = tuple(
        (
            PageEntry(report.measure(score.measure).title),
            PageEntry(columns[score.column]),
            PageEntry(score.over),
            PageEntry(f"{score.cells}"),
            PageEntry(percent(score.geometric_mean_error)),
            PageEntry(UNKNOWN if score.rank_correlation is None else f"{score.rank_correlation:.2f}"),
        )
        for score in evaluated.scores
    )
    if not rows:
        return []
    headings = ("measure", "column", "over", "cells", "geometric-mean error", "rank correlation")
    return [Heading("Scores"), Text(_ABOUT_SCORES), RenderedTable(headings, rows, left=3)]


def claims(evaluated: Evaluated) -> list[Block]:
    """Return which claims hold: a row per claim, an answer per column, and why."""
    columns = evaluated.report.columns
    wheres = any(claim.where for claim in evaluated.report.claims)
    rows = []
    for claim in evaluated.report.claims:
        found = {verdict.column: verdict for verdict in evaluated.verdicts if verdict.claim == claim}
        answers = [found.get(column.name, found.get("")) for column in columns]
        why = dict.fromkeys(
            _why(verdict, column.title, answers) for verdict, column in zip(answers, columns, strict=True)
        )
        rows.append((
            PageEntry(claim.text),
            *((PageEntry(claim.where),) if wheres else ()),
            *(PageEntry(UNKNOWN if verdict is None else verdict.answer) for verdict in answers),
            PageEntry("; ".join(each for each in why if each)),
        ))  # fmt: skip
    headings = ("claim", *(("where",) if wheres else ()), *(column.title for column in columns), "why")
    return [Heading("Claims"), RenderedTable(headings, tuple(rows), left=len(headings))] if rows else []


def _why(verdict: Verdict | None, title: str, answers: Sequence[Verdict | None]) -> str:
    """Return why an answer is what it is, with its column where the columns' reasons differ."""
    if verdict is None or not verdict.reason:
        return ""
    same = len({each.reason for each in answers if each is not None}) == 1
    return verdict.reason if same else f"{title}: {verdict.reason}"
