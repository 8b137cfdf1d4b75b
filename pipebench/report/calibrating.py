"""Calibrate a report with progress, print the result and optionally write the constants."""

import time
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from pipebench.formats import seconds
from pipebench.recipe.catalog import display
from pipebench.report.calibrate import Calibrated, calibrate, published_of, write_value
from pipebench.report.definition import Report
from pipebench.report.fitting import Cell
from pipebench.report.recipes import ReportRun
from pipebench.report.scores import geometric_mean_error, rank_correlation
from pipebench.report.wording import published_text
from pipebench.show.comparison import markdown_table
from pipebench.show.progress import preparing
from pipebench.show.terminal import standard_output

_FITTING = "fitting"
_ROUNDS = 6  # estimated number of values tried per constant, and as many again for each cell that is left out


def print_calibration(report: Report, asked: Sequence[ReportRun], *, writes: bool) -> None:
    """Calibrate a report and print the result.

    `writes` puts the constants into the clusters' files.

    Raises:
        UserError: there are no constants, or they can't be fitted or written.
    """
    with preparing(report.name, standard_output(), prints_lines=True, work=_FITTING) as say:
        progress = _Progress(report, say)
        calibrated = calibrate(report, asked, progress.run, progress.leave_out)
    _say(calibration_text(calibrated))
    if writes:
        for site in calibrated.sites:
            write_value(site, calibrated.fitted[site.constant.name], report.name)
        for path in dict.fromkeys(site.path for site in calibrated.sites):
            _say(f"written: {display(path)}")


class _Progress:
    """Reports which simulation begins, and estimates the remaining time."""

    def __init__(self, report: Report, say: Callable[[str], None]) -> None:
        calibration = report.calibration
        cells = sum(len(constant.fitted_on) for constant in calibration.constants) if calibration else 0
        self._expected = 2 * cells * (_ROUNDS + _ROUNDS)  # two runs per cell; then again, without each
        self._say = say
        self._done = 0  # simulations
        self._phase = _FITTING
        self._start_s = time.monotonic()

    def run(self, asked: ReportRun) -> None:
        """Report the start of a simulation."""
        self._done += 1
        left_s = max(0.0, (time.monotonic() - self._start_s) / self._done * (self._expected - self._done))
        left = f"about {seconds(round(left_s))} left"
        self._say(f"{self._phase}: {self._done} simulations, {asked.row} {asked.run}, {left}")

    def leave_out(self) -> None:
        """Enter the leave-one-out phase."""
        self._phase = "leaving each cell out"


def _say(text: str) -> None:
    standard_output().print(Text(text), soft_wrap=True)


def calibration_text(calibrated: Calibrated) -> str:
    """Return constants, cells and scores as Markdown tables."""
    return "\n".join(
        [
            markdown_table(("constant", "cluster", "key", "before", "fitted", "fitted on"), _constants(calibrated)),
            "",
            markdown_table(
                ("cell", "published", "fitted or predicted", "value", "ratio", "left out"), _cells(calibrated)
            ),
            "",
            markdown_table(("cells", "how many", "geometric-mean error", "rank correlation"), _scores(calibrated)),
            "",
            "Left out: with its constants fitted without this cell. Cells that hold by construction don't count.",
        ]
    )


def _constants(calibrated: Calibrated) -> Iterator[tuple[str, ...]]:
    for site in calibrated.sites:
        constant = site.constant
        before, after = (site.text(value) for value in (site.value, calibrated.fitted[constant.name]))
        cells = ", ".join(f"{row}.{measure}" for row, measure in constant.fitted_on)
        key = f"{site.level}.{site.key}" if site.level else site.key
        yield constant.name, site.cluster, key, before, after, cells


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
    """Yield the scores of fitted, predicted and all cells, and of leave-one-out predictions."""
    free = [cell for cell in calibrated.values if cell not in _constructed(calibrated)]
    fitted = [cell for cell in free if cell in calibrated.left_out]
    predicted = [cell for cell in free if cell not in calibrated.left_out]
    values = dict(calibrated.values)
    for name, cells in (("fitted on", fitted), ("predicted", predicted), ("all", free)):
        yield _score(calibrated, name, cells, [values[cell] for cell in cells])
    left = [cell for cell in free if calibrated.left_out.get(cell, 0.0) is not None]
    without = [calibrated.left_out.get(cell) or values[cell] for cell in left]
    yield _score(calibrated, "all, each left out of the fit", left, without)
    for key, predicted_without in calibrated.groups.items():
        yield _score(calibrated, f"all, each {key} left out", free, [predicted_without[cell] for cell in free])


def _score(calibrated: Calibrated, name: str, cells: Sequence[Cell], values: Sequence[float]) -> tuple[str, ...]:
    published = [published_of(calibrated.report, cell) for cell in cells]
    ratios = [value / each for value, each in zip(values, published, strict=True)]
    error = f"{geometric_mean_error(ratios):.1%}" if ratios else ""
    rank = rank_correlation(values, published)
    return name, str(len(cells)), error, "" if rank is None else f"{rank:.2f}"


def _constructed(calibrated: Calibrated) -> set[Cell]:
    return {(row.name, measure) for row in calibrated.report.rows for measure in row.by_construction}
