"""Fit a report's constants to published cells and predict all others.

Constants are rates of links and host times of devices. A cluster's file holds one number per line (`ring: {value: 2.7
GB/s, calibrated: "on ..."}`), so one can be rewritten without changing any other line.

Runs are simulated in this process in the calibration's column; plans left to the planner are made anew for each cluster
tried. Results are cached by recipe and cluster.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipebench.cluster import Cluster
from pipebench.errors import UserError, choice
from pipebench.files import replace as replace_file
from pipebench.recipe.catalog import display, find_cluster
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.yaml_file import parse
from pipebench.report.definition import Constant, Measure, Report, Row
from pipebench.report.expressions import Value, evaluate
from pipebench.report.fitting import Cell, Sought, fit, left_out
from pipebench.report.metrics import value_of
from pipebench.report.recipes import ReportRun
from pipebench.tracking.identity import recipe_hash
from pipebench.train.engines import simulate
from pipebench.train.prepare import prepare
from pipebench.train.result import RunResult
from pipebench.units import UnitError, parse_bandwidth, parse_duration

# Keys of a level, whose attributes end in `_bytes_per_s`, and of a cluster, whose attributes end in `_s`.
_OF_LEVELS = ("bandwidth", "host_copy", "flow", "ring", "stage_ring", "p2p")
_OF_CLUSTERS = ("launch", "pause")
_FORM = f"levels.NAME.KEY, {', '.join(_OF_CLUSTERS)}"
_DIGITS = 3


@dataclass(frozen=True)
class ConstantSite:
    """The place of a constant in a cluster's file."""

    constant: Constant
    path: Path  # the cluster's file
    level: str  # name of the level; "" for a key of the cluster itself
    key: str  # of the level, one of bandwidth, host_copy, flow, ring, stage_ring, p2p; of the cluster, launch or pause
    low: float  # smallest allowed value [bytes/s or s]
    high: float  # largest allowed value [bytes/s or s]
    value: float  # present value [bytes/s or s]

    @property
    def cluster(self) -> str:
        """The cluster's short name."""
        return self.path.stem

    def text(self, value: float) -> str:
        """Format a value as in a cluster's file."""
        return f"{value / 1e9:.{_DIGITS}g} GB/s" if self.level else f"{value * 1e6:.{_DIGITS}g} us"


def find_site(constant: Constant, folder: Path) -> ConstantSite:
    """Locate a constant in its cluster's file; a cluster's path may be relative to `folder`, the report's.

    Raises:
        UserError: there is nothing to fit.
    """
    path = find_cluster(constant.cluster, folder)
    cluster = load_cluster(str(path), 1)
    level, key = _level_and_key(constant, cluster)
    if _line(path.read_text(encoding="utf-8").splitlines(), level, key) is None:
        where = f" at level {level}" if level else ""
        problem = f"{display(path)} has no line {key}: {{value: ..., ...}} of its own{where}"
        raise _wrong(constant, "key", problem)
    parse: Callable[[object], float] = parse_bandwidth if level else parse_duration
    try:
        low, high = parse(constant.low), parse(constant.high)
    except UnitError as error:
        raise _wrong(constant, "from, to", str(error)) from error
    site = ConstantSite(constant, path, level, key, low, high, _value(cluster, level, key))
    if not 0 < low <= site.value <= high or low == high:
        what = f"got {constant.low} to {constant.high}, needed are two numbers above 0 around {site.text(site.value)}"
        raise _wrong(constant, "from, to", what)
    return site


def _level_and_key(constant: Constant, cluster: Cluster) -> tuple[str, str]:
    """Return the level ("" for the cluster itself) and the key within it that a constant names."""
    if constant.key in _OF_CLUSTERS:
        return "", constant.key
    parts = constant.key.split(".")
    if len(parts) != 3 or parts[0] != "levels":
        raise _wrong(constant, "key", f"got {constant.key[:60]!r}, allowed is {_FORM}")
    _, level, key = parts
    if key not in _OF_LEVELS:
        raise _wrong(constant, "key", choice(key[:60], _OF_LEVELS))
    names = [each.name for each in cluster.levels]
    if level not in names:
        raise _wrong(constant, "key", choice(level[:60], names))
    return level, key


def _value(cluster: Cluster, level: str, key: str) -> float:
    if not level:
        return float(getattr(cluster, f"{key}_s"))
    return float(next(getattr(each, f"{key}_bytes_per_s") for each in cluster.levels if each.name == level))


def with_values(cluster: Cluster, sites: Sequence[ConstantSite], values: Mapping[str, float]) -> Cluster:
    """Return a cluster with its constants set to `values`, by constant's name [bytes/s or s]."""
    levels, own = {level.name: level for level in cluster.levels}, dict[str, Any]()
    for site in sites:
        if site.cluster != cluster.name:
            continue
        value = values[site.constant.name]
        if site.level:
            given: dict[str, Any] = {f"{site.key}_bytes_per_s": value}
            levels[site.level] = replace(levels[site.level], **given)
        else:
            own[f"{site.key}_s"] = value
    return replace(cluster, levels=tuple(levels.values()), **own)


def write_value(site: ConstantSite, value: float, report: str) -> None:
    """Write a constant [bytes/s or s] and its fitted cells into its cluster's file; every other line stays.

    Raises:
        UserError: the file can't be written.
    """
    lines = site.path.read_text(encoding="utf-8").splitlines(keepends=True)
    found = _line(lines, site.level, site.key)
    assert found is not None  # `find_site` has found it
    index, match = found
    said = next(str(text) for name, text in parse(match["rest"]).items() if name != "value")
    _, colon, what = said.partition(": ")  # the description follows the first colon
    cells = ", ".join(f"{row}.{measure}" for row, measure in site.constant.fitted_on)
    source = json.dumps(f"on {cells} of {report}{colon}{what}", ensure_ascii=False)
    lines[index] = f"{match['head']}{{value: {site.text(value)}, calibrated: {source}}}\n"
    try:
        replace_file(site.path, "".join(lines).encode())
    except OSError as error:
        raise UserError(f"{display(site.path)} can't be written: {error.strerror}") from error


def _line(lines: Sequence[str], level: str, key: str) -> tuple[int, re.Match[str]] | None:
    """Return index and match of a key's line in a level, or before all levels if `level` is ""; None without one."""
    inside = not level
    for index, line in enumerate(lines):
        name = re.match(r"\s*- name: (\S+)", line)
        if name:
            inside = name[1] == level
        match = re.match(rf"(?P<head>[\s-]*{key}: )(?P<rest>\{{value: .*\}})\s*$", line)
        if inside and match:
            return index, match
    return None


def _wrong(constant: Constant, key: str, problem: str) -> UserError:
    return UserError(f"calibration.constants.{constant.name}.{key}: {problem}")


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration."""

    report: Report
    sites: tuple[ConstantSite, ...]
    fitted: Mapping[str, float]  # by constant's name [bytes/s or s]
    values: Mapping[Cell, float]  # reproduced with these constants, of every cell with an exact published number
    # Leave-one-out prediction of every fitted cell; None if its constants have no other cell
    left_out: Mapping[Cell, float | None]
    # By key of the calibration's `leave_out`: cells as predicted by a fit without any cell of their own group
    groups: Mapping[str, Mapping[Cell, float]]


@dataclass
class Simulations:
    """Cells of a column as a function of the constants."""

    report: Report
    asked: Mapping[tuple[str, str], ReportRun]  # the column's runs, by (row, run)
    sites: Sequence[ConstantSite]
    on_run: Callable[[ReportRun], None]  # called before every simulation
    _results: dict[tuple[str, Cluster], RunResult] = field(default_factory=dict)

    def value(self, values: Mapping[str, float], cell: Cell) -> float:
        """Return a cell's value with given constants [bytes/s or s]; raises a UserError if it has none."""
        row, measure = self.report.row(cell[0]), self.report.measure(cell[1])
        assert measure.expression is not None

        def lookup(run: str, metric: str) -> Value:
            found = value_of(self._result(values, self.asked[row.name, run]), metric)
            if isinstance(found, str):
                raise UserError(f"{row.name}.{measure.name} can't be fitted on: {found}")
            return found

        return float(evaluate(measure.expression, lookup))  # type: ignore[arg-type] # validated: a number

    def error(self, values: Mapping[str, float], cell: Cell) -> float:
        """Return ln(reproduced / published) of a cell."""
        return math.log(self.value(values, cell) / published_of(self.report, cell))

    def _result(self, values: Mapping[str, float], asked: ReportRun) -> RunResult:
        cluster = with_values(asked.loaded.cluster, self.sites, values)
        key = recipe_hash(asked.loaded), cluster
        found = self._results.get(key)
        if found is None:
            self.on_run(asked)
            found, _ = simulate(prepare(asked.loaded.recipe, cluster, trains=False))
            self._results[key] = found
        return found


def calibrate(
    report: Report, asked: Sequence[ReportRun], on_run: Callable[[ReportRun], None], on_fit: Callable[[], None]
) -> Calibrated:
    """Fit a report's constants.

    Args:
        report: with a calibration.
        asked: the report's runs.
        on_run: called before every simulation.
        on_fit: called between the fit and the leave-one-out fits.

    Raises:
        UserError: the report has no calibration, or its constants can't be fitted.
    """
    calibration = report.calibration
    if calibration is None:
        raise UserError(f"{report.name}: has no calibration: constants, and the cells to fit them on")
    sites = tuple(find_site(constant, report.path.absolute().parent) for constant in calibration.constants)
    runs = {(each.row, each.run): each for each in asked if each.column == calibration.column}
    simulations = Simulations(report, runs, sites, on_run)
    sought = [Sought(site.constant.name, site.low, site.high, site.constant.fitted_on) for site in sites]
    fitted = fit(sought, simulations.error, {site.constant.name: site.value for site in sites})
    values = {cell: simulations.value(fitted, cell) for cell in _cells(report, runs)}
    on_fit()
    errors = left_out(sought, simulations.error, fitted)
    without = {
        cell: None if error is None else published_of(report, cell) * math.exp(error) for cell, error in errors.items()
    }
    groups = {key: _without_groups(simulations, key, sought, fitted, values) for key in calibration.leave_out}
    return Calibrated(report, sites, fitted, values, without, groups)


def _without_groups(
    simulations: Simulations,
    key: str,
    sought: Sequence[Sought],
    fitted: Mapping[str, float],
    values: Mapping[Cell, float],
) -> dict[Cell, float]:
    """Return every cell as predicted by constants fitted without the cells of its group.

    Constants with no cell in the group keep their fitted value. A constant without any cell outside the group takes its
    largest allowed value, for a link the published bandwidth.
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


def _cells(report: Report, runs: Mapping[tuple[str, str], ReportRun]) -> list[Cell]:
    """Return the cells with an exact published number whose runs are all simulated in the column."""
    cells = ((row, measure) for row in report.rows for measure in report.measures)
    return [(row.name, measure.name) for row, measure in cells if _counts(row, measure, runs)]


def _counts(row: Row, measure: Measure, runs: Mapping[tuple[str, str], ReportRun]) -> bool:
    published = row.published.get(measure.name)
    if measure.expression is None or published is None or published.bound != "exact":
        return False
    return all((row.name, run) in runs for run in measure.runs) and not isinstance(published.value, str)
