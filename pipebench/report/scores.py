"""Scores of a column: how well its cells agree with the published numbers.

The geometric-mean error is the relative error of a typical cell, symmetric for values above and below the published
ones. Spearman's rank correlation compares the order of the cells.
"""

import math
import statistics
from collections.abc import Iterator, Sequence

from pipebench.report.definition import Measure, Report
from pipebench.report.evaluated import (
    ALL,
    CONSTANT,
    NOT_BY_CONSTRUCTION,
    NOT_CHOSEN,
    NOT_FITTED,
    Score,
    TableCell,
    Verdict,
)

_FEWEST = 3  # of two cells the rank correlation is always 1 or -1


def scores_of(report: Report, cells: Sequence[TableCell]) -> Iterator[Score]:
    """Yield the scores of every column and measure: over all cells, then over each informative subset if smaller."""
    for measure in report.measures:
        for column in report.columns:
            before: list[TableCell] = []
            sets = _sets(report, measure, column.name, cells)
            for over, some in sets.items():
                if some and some != before:
                    yield _score(column.name, measure.name, over, some)
                before = some
            fitted = [cell for cell in sets[NOT_BY_CONSTRUCTION] if cell.fitted and not measure.published_as]
            if fitted:
                yield from _constant(measure, [_published(cell) for cell in fitted], sets)


def _sets(report: Report, measure: Measure, column: str, cells: Sequence[TableCell]) -> dict[str, list[TableCell]]:
    """Return the cells of a measure and column with a ratio: all, and each informative subset of the set before."""
    mine = [cell for cell in cells if (cell.measure, cell.column) == (measure.name, column)]
    counted = [cell for cell in mine if cell.ratio is not None and cell.ratio > 0]
    # A measure compared with another one's published numbers leaves out the same rows as that one.
    rows = [row for row in report.rows if measure.published_as]
    constructed = {row.name for row in rows if measure.published_name in row.by_construction}
    chosen = {row.name for row in rows if measure.published_name in row.chosen}
    free = [cell for cell in counted if cell.by_construction is None and cell.row not in constructed]
    predicted = [cell for cell in free if not cell.fitted]
    blind = [cell for cell in predicted if cell.chosen is None and cell.row not in chosen]
    return {ALL: counted, NOT_BY_CONSTRUCTION: free, NOT_FITTED: predicted, NOT_CHOSEN: blind}


def _constant(measure: Measure, fitted: Sequence[float], sets: dict[str, list[TableCell]]) -> Iterator[Score]:
    """Yield the scores of a baseline that predicts the geometric mean of the fitted cells' published values."""
    mean = math.exp(math.fsum(map(math.log, fitted)) / len(fitted))
    for over in (NOT_FITTED, NOT_CHOSEN):
        ratios = [mean / _published(cell) for cell in sets[over]]
        if ratios and (over == NOT_FITTED or sets[over] != sets[NOT_FITTED]):
            yield Score(CONSTANT, measure.name, over, len(ratios), geometric_mean_error(ratios), None)


def claim_scores(report: Report, verdicts: Sequence[Verdict]) -> Iterator[Score]:
    """Yield the scores of the numbers that claims state, per column."""
    for column in report.columns:
        found = [each for each in verdicts if each.column == column.name and each.ratio is not None and each.ratio > 0]
        ratios = [each.ratio for each in found if each.ratio is not None]
        if ratios:
            yield Score(column.name, "", ALL, len(ratios), geometric_mean_error(ratios), None)


def geometric_mean_error(ratios: Sequence[float]) -> float:
    """Return exp(mean |ln ratio|) - 1 of at least one reproduced / published ratio above 0."""
    return math.exp(math.fsum(abs(math.log(ratio)) for ratio in ratios) / len(ratios)) - 1


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties averaged; None if undefined."""
    if len(one) < _FEWEST or len({*one}) == 1 or len({*other}) == 1:
        return None
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1 on, ties averaged."""
    below = [sum(other < value for other in values) for value in values]
    return [less + (values.count(value) + 1) / 2 for less, value in zip(below, values, strict=True)]


def _score(column: str, measure: str, over: str, cells: Sequence[TableCell]) -> Score:
    ours = [float(cell.value) for cell in cells if cell.value]
    theirs = [_published(cell) for cell in cells]
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    return Score(column, measure, over, len(cells), geometric_mean_error(ratios), rank_correlation(ours, theirs))


def _published(cell: TableCell) -> float:
    """Return the published number of a cell with a ratio."""
    assert cell.published is not None
    return float(cell.published.value)
