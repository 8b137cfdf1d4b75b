"""Scores and cells against numbers computed by hand."""

import math
from pathlib import Path

import pytest

from pipebench.report.definition import Column, Measure, Published, Report, Row
from pipebench.report.evaluated import ALL, CONSTANT, NOT_BY_CONSTRUCTION, NOT_FITTED, TableCell
from pipebench.report.scores import geometric_mean_error, rank_correlation, scores_of


@pytest.mark.parametrize(
    ("ratios", "wanted"),
    [([1.0], 0.0), ([2.0], 1.0), ([0.5], 1.0), ([2.0, 0.5], 1.0), ([4.0, 1.0], 1.0), ([1.1, 1.0, 1 / 1.21], 0.1)],
)
def test_geometric_mean_error_by_hand(ratios: list[float], wanted: float) -> None:
    assert geometric_mean_error(ratios) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        # The textbook's example of IQ and hours of television: 1 - 6 * 194 / (10 * 99).
        ([86, 97, 99, 100, 101, 103, 106, 110, 112, 113], [2, 20, 28, 27, 50, 29, 7, 17, 6, 12], 1 - 6 * 194 / 990),
        # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: products of what is above the mean of 2.5 add up to 4.5; 4.5 and 5.
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / math.sqrt(4.5 * 5)),
        ([1, 2], [1, 2], None),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_rank_correlation_by_hand(one: list[float], other: list[float], wanted: float | None) -> None:
    found = rank_correlation(one, other)
    assert found == (None if wanted is None else pytest.approx(wanted))
    assert rank_correlation(other, one) == found


def test_scores_are_of_all_cells_and_of_predictions() -> None:
    report = Report("small", Path("small.yaml"), "Small", (Column("c", "C"),), (Measure("m", "M"),), ())

    def cell(row: str, value: float | None, published: Published | None, **more: object) -> TableCell:
        return TableCell(row, "m", "c", value, published=published, **more)  # type: ignore[arg-type]

    cells = [
        cell("a", 2.0, Published(1.0)),
        cell("b", 1.0, Published(1.0), by_construction="both are data parallel"),
        cell("c", 4.0, Published(1.0), fitted=True),
        cell("d", 1.0, Published(2.0)),
        cell("e", 9.0, Published(1.0, "at_least")),  # a bound says nothing of how far off a value is
        cell("f", None, Published(1.0), problem="missed"),
        cell("g", 9.0, None),
    ]
    found = {score.over: score for score in scores_of(report, cells) if score.column == "c"}
    assert {over: score.cells for over, score in found.items()} == {ALL: 4, NOT_BY_CONSTRUCTION: 3, NOT_FITTED: 2}
    errors = [score.geometric_mean_error for score in found.values()]
    assert errors == pytest.approx([2 ** (4 / 4) - 1, 2 ** (4 / 3) - 1, 1.0])


def test_a_baseline_is_scored_over_the_rows_of_its_measure() -> None:
    measures = (Measure("m", "M"), Measure("bytes", "B", published_as="m"))
    rows = tuple(
        Row(
            name,
            name,
            {},
            by_construction={"m": "equal"} if name == "b" else {},
            chosen={"m": "x"} if name == "d" else {},
        )
        for name in "abcd"
    )
    report = Report("small", Path("small.yaml"), "Small", (Column("c", "C"),), measures, rows)
    cells = [
        TableCell(
            row, name, "c", 2.0, published=Published(published), fitted=row in "ac",
            by_construction="equal" if (row, name) == ("b", "m") else None,
            chosen="x" if (row, name) == ("d", "m") else None,
        )
        for name in ("m", "bytes")
        for row, published in zip("abcd", (2.0, 1.0, 8.0, 4.0), strict=True)
    ]  # fmt: skip
    found = {(score.measure, score.column, score.over): score for score in scores_of(report, cells)}
    counts = {ALL: 4, NOT_BY_CONSTRUCTION: 3, NOT_FITTED: 1}
    wanted = {(name, "c", over): count for name in ("m", "bytes") for over, count in counts.items()}
    assert {key: score.cells for key, score in found.items()} == wanted | {("m", CONSTANT, NOT_FITTED): 1}
    # The geometric mean of 2 and 8 is the published 4.
    assert found["m", CONSTANT, NOT_FITTED].geometric_mean_error == pytest.approx(0)
