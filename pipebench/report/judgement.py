"""What a report comes to: how near every column is to what was published, and which claims hold."""

from collections.abc import Sequence

from pipebench.formats import UNKNOWN, percent
from pipebench.report.evaluated import Evaluated, Verdict
from pipebench.report.page import Block, Entry, Heading, Table, Text

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
            Entry(report.measure(score.measure).title),
            Entry(columns[score.column]),
            Entry(score.over),
            Entry(f"{score.cells}"),
            Entry(percent(score.geometric_mean_error)),
            Entry(UNKNOWN if score.rank_correlation is None else f"{score.rank_correlation:.2f}"),
        )
        for score in evaluated.scores
    )
    if not rows:
        return []
    headings = ("measure", "column", "over", "cells", "geometric-mean error", "rank correlation")
    return [Heading("Scores"), Text(_ABOUT_SCORES), Table(headings, rows, left=3)]


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
            Entry(claim.text),
            *((Entry(claim.where),) if wheres else ()),
            *(Entry(UNKNOWN if verdict is None else verdict.answer) for verdict in answers),
            Entry("; ".join(each for each in why if each)),
        ))  # fmt: skip
    headings = ("claim", *(("where",) if wheres else ()), *(column.title for column in columns), "why")
    return [Heading("Claims"), Table(headings, tuple(rows), left=len(headings))] if rows else []


def _why(verdict: Verdict | None, title: str, answers: Sequence[Verdict | None]) -> str:
    """Return why an answer is what it is, with its column where the columns' reasons differ."""
    if verdict is None or not verdict.reason:
        return ""
    same = len({each.reason for each in answers if each is not None}) == 1
    return verdict.reason if same else f"{title}: {verdict.reason}"
