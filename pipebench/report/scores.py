"""Scores of a column over cells with a published number.

The geometric-mean error is a typical cell's relative error, up or down alike; Spearman's rank correlation compares the
order of cells.
"""

import math
from collections.abc import Iterator, Sequence

from pipebench.report.definition import Report
from pipebench.report.evaluated import ALL, NOT_BY_CONSTRUCTION, NOT_FITTED, Score, TableCell

_FEWEST = 3  # ranks of two are always right or always wrong


def scores_of(report: Report, cells: Sequence[TableCell]) -> Iterator[Score]:
    """Yield the scores of every column and measure: over all cells, then over informative subsets if smaller."""
    for measure in report.measures:
        for column in report.columns:
            mine = [cell for cell in cells if (cell.measure, cell.column) == (measure.name, column.name)]
            counted = [cell for cell in mine if cell.ratio is not None and cell.ratio > 0]
            free = [cell for cell in counted if cell.by_construction is None]
            before: list[TableCell] = []
            predicted = [cell for cell in free if not cell.fitted]
            for over, some in ((ALL, counted), (NOT_BY_CONSTRUCTION, free), (NOT_FITTED, predicted)):
                if some and some != before:
                    yield _score(column.name, measure.name, over, some)
                before = some


def geometric_mean_error(ratios: Sequence[float]) -> float:
    """Return exp(mean |ln ratio|) - 1 of at least one reproduced / published ratio above 0."""
    return math.exp(math.fsum(abs(math.log(ratio)) for ratio in ratios) / len(ratios)) - 1


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties averaged; None if undefined."""
    if len(one) < _FEWEST or len({*one}) == 1 or len({*other}) == 1:
        return None
    mean = (len(one) + 1) / 2
    a, b = ([rank - mean for rank in _ranks(values)] for values in (one, other))
    product = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return product / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1 on, ties averaged."""
    below = [sum(other < value for other in values) for value in values]
    return [less + (values.count(value) + 1) / 2 for less, value in zip(below, values, strict=True)]


def _score(column: str, measure: str, over: str, cells: Sequence[TableCell]) -> Score:
    pairs = [(cell.value, cell.published.value) for cell in cells if cell.published is not None]
    ours, theirs = ([float(each) for each in side if each is not None] for side in zip(*pairs, strict=True))
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    return Score(column, measure, over, len(cells), geometric_mean_error(ratios), rank_correlation(ours, theirs))
