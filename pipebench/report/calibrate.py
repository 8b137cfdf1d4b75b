"""Fit a report's constants to published cells and predict all others.

Runs are simulated in this process in the calibration's column; plans left to the planner are made anew for each cluster
tried. Results are cached by recipe and cluster.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipebench.cluster import Cluster
from pipebench.errors import UserError
from pipebench.report.constants import ConstantSite, find_place, with_values
from pipebench.report.definition import Measure, Report, Row
from pipebench.report.expressions import Value, evaluate
from pipebench.report.fitting import Cell, Sought, fit, left_out
from pipebench.report.metrics import value_of
from pipebench.report.recipes import Asked
from pipebench.tracking.identity import recipe_hash
from pipebench.train.engines import simulate
from pipebench.train.prepare import prepare
from pipebench.train.result import RunResult


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration."""

    report: Report
    places: tuple[ConstantSite, ...]
    fitted: Mapping[str, float]  # by constant's name [bytes/s or s]
    values: Mapping[Cell, float]  # reproduced with these constants, of every cell with an exact published number
    # Leave-one-out prediction of every fitted cell; None if its constants have no other cell
    left_out: Mapping[Cell, float | None]
    # By key of the calibration's `leave_out`: cells as predicted without any cell of their own group
    groups: Mapping[str, Mapping[Cell, float]]


@dataclass
class Simulations:
    """Cells of a column as a function of the constants."""

    report: Report
    asked: Mapping[tuple[str, str], Asked]  # the column's runs by (row, run)
    places: Sequence[ConstantSite]
    on_run: Callable[[Asked], None]  # called before every simulation
    _results: dict[tuple[str, Cluster], RunResult] = field(default_factory=dict)

    def value(self, values: Mapping[str, float], cell: Cell) -> float:
        """Return a cell's value with given constants [bytes/s or s]; raises a UserError if it has none."""
        row, measure = self.report.row(cell[0]), self.report.measure(cell[1])
        assert measure.expression is not None

        def look(run: str, metric: str) -> Value:
            found = value_of(self._result(values, self.asked[row.name, run]), metric)
            if isinstance(found, str):
                raise UserError(f"{row.name}.{measure.name} can't be fitted on: {found}")
            return found

        return float(evaluate(measure.expression, look))  # type: ignore[arg-type] # validated: a number

    def error(self, values: Mapping[str, float], cell: Cell) -> float:
        """Return ln(reproduced / published) of a cell."""
        return math.log(self.value(values, cell) / published_of(self.report, cell))

    def _result(self, values: Mapping[str, float], asked: Asked) -> RunResult:
        cluster = with_values(asked.loaded.cluster, self.places, values)
        key = recipe_hash(asked.loaded), cluster
        found = self._results.get(key)
        if found is None:
            self.on_run(asked)
            found, _ = simulate(prepare(asked.loaded.recipe, cluster, trains=False))
            self._results[key] = found
        return found


def calibrate(
    report: Report, asked: Sequence[Asked], on_run: Callable[[Asked], None], on_fit: Callable[[], None]
) -> Calibrated:
    """Fit a report's constants; raises a UserError if it has none or they can't be fitted.

    `on_run` is called before every simulation, `on_fit` between the fit and the leave-one-out fits.
    """
    calibration = report.calibration
    if calibration is None:
        raise UserError(f"{report.name}: has no calibration: constants, and the cells to fit them on")
    places = tuple(find_place(constant, report.path.absolute().parent) for constant in calibration.constants)
    runs = {(each.row, each.run): each for each in asked if each.column == calibration.column}
    simulations = Simulations(report, runs, places, on_run)
    sought = [Sought(place.constant.name, place.low, place.high, place.constant.fitted_on) for place in places]
    fitted = fit(sought, simulations.error, {place.constant.name: place.value for place in places})
    values = {cell: simulations.value(fitted, cell) for cell in _cells(report, runs)}
    on_fit()
    errors = left_out(sought, simulations.error, fitted)
    without = {
        cell: None if error is None else published_of(report, cell) * math.exp(error) for cell, error in errors.items()
    }
    groups = {key: _without_groups(simulations, key, sought, fitted, values) for key in calibration.leave_out}
    return Calibrated(report, places, fitted, values, without, groups)


def _without_groups(
    simulations: Simulations,
    key: str,
    sought: Sequence[Sought],
    fitted: Mapping[str, float],
    values: Mapping[Cell, float],
) -> dict[Cell, float]:
    """Return every cell as predicted by constants fitted without the cells of its group.

    Constants with no cell in the group keep their fitted value; one without any cell left is its largest allowed, what
    the link carries as published.
    """
    report, found = simulations.report, dict(values)
    for group in dict.fromkeys(report.row(row).at.get(key) for row, _ in values):
        own = [cell for cell in values if report.row(cell[0]).at.get(key) == group]
        left = [replace(each, cells=tuple(cell for cell in each.cells if cell not in own)) for each in sought]
        changed = [each for each, before in zip(left, sought, strict=True) if each != before]
        if changed:
            unknown = {each.name: each.high for each in changed if not each.cells}
            constants = fit(changed, simulations.error, {**fitted, **unknown})
            found |= {cell: simulations.value(constants, cell) for cell in own}
    return found


def published_of(report: Report, cell: Cell) -> float:
    """Return the published number of a cell that has one."""
    return float(report.row(cell[0]).published[cell[1]].value)


def _cells(report: Report, runs: Mapping[tuple[str, str], Asked]) -> list[Cell]:
    """Return the cells with an exact published number whose runs are all simulated in the column."""
    cells = ((row, measure) for row in report.rows for measure in report.measures)
    return [(row.name, measure.name) for row, measure in cells if _counts(row, measure, runs)]


def _counts(row: Row, measure: Measure, runs: Mapping[tuple[str, str], Asked]) -> bool:
    published = row.published.get(measure.name)
    if measure.expression is None or published is None or published.bound != "exact":
        return False
    return all((row.name, run) in runs for run in measure.runs) and not isinstance(published.value, str)
