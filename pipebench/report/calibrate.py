"""Fits a report's constants on the cells that it names, and says what that is worth on all the others.

Runs are simulated here, in this process, as the report's column has them: plans that a recipe leaves to the planner are
made anew on every cluster that is tried. What a recipe comes to on a cluster is computed once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
    """What a calibration comes to.

    Attributes:
        report: whose cells it is about.
        places: of the constants.
        fitted: by constant's name, what they come to [bytes/s or s].
        values: by cell, with these constants: every cell with an exact published number.
        left_out: by fitted cell, the value with its constants fitted without it; None where one has no other cell.
    """

    report: Report
    places: tuple[ConstantSite, ...]
    fitted: Mapping[str, float]
    values: Mapping[Cell, float]
    left_out: Mapping[Cell, float | None]


@dataclass
class Simulations:
    """What the cells of a column come to with other constants.

    Attributes:
        report: the report.
        asked: the column's runs by (row, run).
        places: of the constants.
        on_run: told of every simulation, before it begins.
    """

    report: Report
    asked: Mapping[tuple[str, str], Asked]
    places: Sequence[ConstantSite]
    on_run: Callable[[Asked], None]
    _results: dict[tuple[str, Cluster], RunResult] = field(default_factory=dict)

    def value(self, values: Mapping[str, float], cell: Cell) -> float:
        """Return what a cell comes to.

        Args:
            values: of the constants, by name [bytes/s or s].
            cell: row and measure.

        Raises:
            UserError: it has no value.
        """
        row, measure = self.report.row(cell[0]), self.report.measure(cell[1])
        assert measure.expression is not None

        def look(run: str, metric: str) -> Value:
            found = value_of(self._result(values, self.asked[row.name, run]), metric)
            if isinstance(found, str):
                raise UserError(f"{row.name}.{measure.name} can't be fitted on: {found}")
            return found

        return float(evaluate(measure.expression, look))  # type: ignore[arg-type] # validated: a number

    def error(self, values: Mapping[str, float], cell: Cell) -> float:
        """Return ln(reproduced / published) of a cell; arguments as for `value`."""
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
    """Fit a report's constants.

    Args:
        report: the report.
        asked: its runs.
        on_run: told of every simulation, before it begins.
        on_fit: told when the constants are found and are to be found again without each cell.

    Raises:
        UserError: it has no constants, or they can't be fitted.
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
    return Calibrated(report, places, fitted, values, without)


def published_of(report: Report, cell: Cell) -> float:
    """Return the number that is published of a cell that has one."""
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
