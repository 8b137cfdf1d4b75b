"""A calibration as Markdown: the constants, the cells they were fitted on, and what is left of the error elsewhere."""

from collections.abc import Iterable, Iterator, Sequence

from pipebench.report.calibrate import Calibrated, published_of
from pipebench.report.fitting import Cell
from pipebench.report.scores import geometric_mean_error, rank_correlation
from pipebench.report.wording import published_text


def calibration_text(calibrated: Calibrated) -> str:
    """Return the whole of it."""
    return "\n".join(
        [
            *_table(("constant", "cluster", "key", "before", "fitted", "fitted on"), _constants(calibrated)),
            "",
            *_table(("cell", "published", "fitted or predicted", "value", "ratio", "left out"), _cells(calibrated)),
            "",
            *_table(("cells", "how many", "geometric-mean error", "rank correlation"), _scores(calibrated)),
            "",
            "Left out: with its constants fitted without this cell. Cells that hold by construction don't count.",
        ]
    )


def _constants(calibrated: Calibrated) -> Iterator[tuple[str, ...]]:
    for place in calibrated.places:
        constant = place.constant
        before, after = (place.text(value) for value in (place.value, calibrated.fitted[constant.name]))
        cells = ", ".join(f"{row}.{measure}" for row, measure in constant.fitted_on)
        yield constant.name, place.cluster, place.told, before, after, cells


def _cells(calibrated: Calibrated) -> Iterator[tuple[str, ...]]:
    report = calibrated.report
    for cell, value in calibrated.values.items():
        row, measure = report.row(cell[0]), report.measure(cell[1])
        published = published_of(report, cell)
        without = calibrated.left_out.get(cell)
        kind = "by construction" if cell in _constructed(calibrated) else "predicted"
        if cell in calibrated.left_out:
            kind = "fitted"
        yield (
            f"{row.name}.{measure.name}",
            published_text(row.published[measure.name], measure),
            kind,
            f"{value:.3g}",
            f"{value / published:.2f}",
            "" if without is None else f"{without:.3g}",
        )


def _scores(calibrated: Calibrated) -> Iterator[tuple[str, ...]]:
    """Yield the error of fitted cells, of predictions, of all; and of all when each is predicted by the others."""
    free = [cell for cell in calibrated.values if cell not in _constructed(calibrated)]
    fitted = [cell for cell in free if cell in calibrated.left_out]
    predicted = [cell for cell in free if cell not in calibrated.left_out]
    values = dict(calibrated.values)
    for name, cells in (("fitted on", fitted), ("predicted", predicted), ("all", free)):
        yield _score(calibrated, name, cells, [values[cell] for cell in cells])
    left = [cell for cell in free if calibrated.left_out.get(cell, 0.0) is not None]
    without = [calibrated.left_out.get(cell) or values[cell] for cell in left]
    yield _score(calibrated, "all, each left out of the fit", left, without)


def _score(calibrated: Calibrated, name: str, cells: Sequence[Cell], values: Sequence[float]) -> tuple[str, ...]:
    published = [published_of(calibrated.report, cell) for cell in cells]
    ratios = [value / each for value, each in zip(values, published, strict=True)]
    error = f"{geometric_mean_error(ratios):.1%}" if ratios else ""
    rank = rank_correlation(values, published)
    return name, str(len(cells)), error, "" if rank is None else f"{rank:.2f}"


def _constructed(calibrated: Calibrated) -> set[Cell]:
    return {(row.name, measure) for row in calibrated.report.rows for measure in row.by_construction}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for line in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(line)} |"
