"""Definition of a report: rows, their runs, measures of these, and published values.

One YAML file per published table or figure, read by `pipebench.report.load`; nothing runs here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipebench.report.expressions import Expression

UNITS = ("x", "share", "s", "bytes", "samples/s", "count", "none")
BETTER = ("higher", "lower")
Bound = Literal["exact", "at_least", "at_most", "about"]
# Keys of each kind of picture.
PICTURES: Mapping[str, tuple[str, ...]] = {
    "bars": ("measures", "bound", "line"),
    "scatter": ("measures",),
    "lines": ("measure", "x", "group", "bound", "line"),
    "curves": ("runs", "metric", "over", "row"),
    "phases": ("runs", "metric", "bound", "line", "title"),
    "stages": ("runs", "metric", "row", "line", "title"),
    "schedule": ("run", "row"),
}
OVER = ("epochs", "samples", "virtual_time_s")
# The default column: recipes unchanged.
REPRODUCED = "reproduced"


@dataclass(frozen=True)
class Column:
    """A variant of all rows' recipes."""

    name: str
    title: str
    clusters: Mapping[str, str] = field(default_factory=dict)  # replacement of a recipe's cluster
    words: tuple[str, ...] = ()  # `key=value` as on the command line, for every run
    optional: tuple[str, ...] = ()  # like `words`, skipped if a recipe's model or data set has no such option


@dataclass(frozen=True)
class Measure:
    """The definition of a cell's content: a number computed from metrics of the row's runs, or the plan of one run."""

    name: str
    title: str
    unit: str = "none"  # one of UNITS; `none` for plans
    expression: Expression | None = None  # over `run.metric`; None for a plan
    plan_of: str | None = None  # the run whose plan is shown; None for a number
    against: str | None = None  # the run of the published plan, with which a chosen plan that differs is compared
    better: str | None = None  # `higher`, `lower` or None
    shown: bool = True  # in tables; False if used only in pictures, claims or text
    published_as: str | None = None  # the measure whose published values it is compared with; None for its own
    chosen: Mapping[str, str] = field(default_factory=dict)  # by column, what was chosen knowing the cells' results

    @property
    def published_name(self) -> str:
        """The measure under which rows have its published values."""
        return self.published_as or self.name

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs it uses."""
        if self.expression is not None:
            return tuple(dict.fromkeys(run for run, _ in self.expression.metrics))
        return (self.plan_of,) if self.plan_of is not None else ()


@dataclass(frozen=True)
class RunReference:
    """A run of a row: a recipe, once per seed."""

    words: tuple[str, ...]  # a recipe, then `key=value`, as on the command line
    engine: str = "simulated"
    seeds: tuple[int, ...] | None = None  # one run per seed; None for the recipe's own seed
    same: bool = False  # whether it is the same in all columns
    largest: bool = False  # whether the minibatch is the largest that fits on the cluster


@dataclass(frozen=True)
class Published:
    """A published value."""

    value: float | str  # a number, or a plan in the papers' notation
    bound: Bound = "exact"


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    title: str
    runs: Mapping[str, RunReference]  # by name
    published: Mapping[str, Published] = field(default_factory=dict)  # by measure
    where: str = ""  # place in the source if it differs from the report's
    by_construction: Mapping[str, str] = field(default_factory=dict)  # by measure, why no other value is possible
    hypothesis: Mapping[str, str] = field(default_factory=dict)  # by measure, the assumption behind the cell
    chosen: Mapping[str, str] = field(default_factory=dict)  # by measure, what was chosen knowing the cell's result
    note: str = ""  # one sentence, or ""
    at: Mapping[str, str | float] = field(default_factory=dict)  # the row's values of `for` and `at`, such as gpus: 4


@dataclass(frozen=True)
class PublishedClaim:
    """A claim of the source, to be tested on the cells."""

    text: str
    where: str = ""  # place in the source if it differs from the report's
    holds: Expression | None = None  # over the cells of one column; None if untestable or about a number
    untestable: str | None = None  # the reason; None if testable
    tolerance: str = ""  # of `holds`, in words: which values count as equal, and why
    number: "ClaimedNumber | None" = None  # None unless the claim states a number


@dataclass(frozen=True)
class ClaimedNumber:
    """A number that the source states in its text, and the tolerance within which a value agrees with it."""

    value: Expression  # over the cells of one column
    unit: str  # one of UNITS
    published: float
    within: float  # largest difference that agrees, relative to the published number


@dataclass(frozen=True)
class Quoted:
    """A number in the report's text that is computed from its cells."""

    expression: Expression  # over the cells of one column
    column: str
    unit: str  # one of UNITS


@dataclass(frozen=True)
class ReferenceLine:
    """A number drawn as a line, such as a device's memory, or a published number that belongs to no row."""

    at: float  # in the unit of the picture's values
    text: str  # in the legend


@dataclass(frozen=True)
class Picture:
    """One picture; PICTURES lists the fields of each kind."""

    kind: str  # one of PICTURES
    measures: tuple[str, ...] = ()  # one for lines
    bound: str = ""  # upper bound, drawn black: a measure (bars, lines) or a metric (phases); "" for none
    x: str = ""  # key of the rows' `at` on the horizontal axis
    group: str = ""  # key of the rows' `at` with a panel per value; "" for one panel
    runs: tuple[str, ...] = ()  # of every row (phases) or of `row`
    words: tuple[tuple[str, str], ...] = ()  # (run, its text in the legend), if that isn't the run's name
    metric: str = ""  # of a run (curves, phases) or of each stage (stages)
    over: tuple[str, ...] = ()  # horizontal axes of curves, one panel each
    row: str = ""
    title: str = ""  # of the values' axis (phases, stages); "" for the metric's name
    line: ReferenceLine | None = None  # across the values' axis

    def word(self, run: str) -> str:
        """Return a run's text in the legend."""
        return dict(self.words).get(run, run.replace("_", " "))


@dataclass(frozen=True)
class Constant:
    """A number of a cluster to be fitted."""

    name: str
    cluster: str  # short name, or path of the file
    key: str  # in that file, levels by name: `levels.server.ring`
    low: str  # smallest allowed value, written as in the file: `0.5 GB/s`
    high: str  # largest allowed value
    fitted_on: tuple[tuple[str, str], ...]  # (row, measure) of cells


@dataclass(frozen=True)
class Calibration:
    """Constants and the cells they are fitted on; every other cell is a prediction."""

    column: str  # the column whose runs use the constants
    constants: tuple[Constant, ...]
    # Keys of the rows' `at`: cross-validation leaves out the rows of each value together
    leave_out: tuple[str, ...] = ()

    @property
    def cells(self) -> frozenset[tuple[str, str]]:
        """(row, measure) of all fitted cells."""
        return frozenset(cell for constant in self.constants for cell in constant.fitted_on)


@dataclass(frozen=True)
class Report:
    """A valid report."""

    name: str  # of the file, without suffix
    path: Path
    title: str  # one line
    columns: tuple[Column, ...]  # at least one, like measures and rows
    measures: tuple[Measure, ...]
    rows: tuple[Row, ...]
    paper: str = ""  # "" for a user's own report
    where: str = ""  # place in the paper
    about: tuple[str | Quoted, ...] = ()  # Markdown before the tables, with quoted numbers
    claims: tuple[PublishedClaim, ...] = ()
    pictures: tuple[Picture, ...] = ()
    calibration: Calibration | None = None  # None if nothing is fitted
    left_out: tuple[Row, ...] = ()  # the file's other rows, if only some were asked for

    def row(self, name: str) -> Row:
        """Return a row by name."""
        return next(row for row in self.rows if row.name == name)

    def measure(self, name: str) -> Measure:
        """Return a measure by name."""
        return next(measure for measure in self.measures if measure.name == name)

    def columns_of(self, measure: Measure) -> tuple[Column, ...]:
        """Return the columns in which a measure's values can differ: only the first if its runs are the same in all."""
        own = [row.runs[run] for row in self.rows for run in measure.runs if run in row.runs]
        return self.columns[:1] if own and all(run.same for run in own) else self.columns
