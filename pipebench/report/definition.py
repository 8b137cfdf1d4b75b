"""What a report asks: its rows, the runs that answer them, what is measured of these, and what was published.

One YAML file per published table or figure says all of it (`pipebench.report.load` reads it); nothing here runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipebench.report.expressions import Expression

UNITS = ("x", "share", "s", "bytes", "samples/s", "count", "none")
BETTER = ("higher", "lower")
Bound = Literal["exact", "at_least", "at_most", "about"]
PICTURES: Mapping[str, tuple[str, ...]] = {
    "bars": ("measures", "bound"),
    "scatter": ("measures",),
    "lines": ("measure", "x", "group", "bound"),
    "curves": ("runs", "metric", "over", "row"),
    "phases": ("runs", "metric", "bound"),
    "stages": ("runs", "metric", "row"),
    "schedule": ("run", "row"),
}  # kinds of pictures, and the keys that each takes
OVER = ("epochs", "samples", "virtual_time_s")
# What everybody who doesn't say otherwise gets: recipes as they are.
REPRODUCED = "reproduced"


@dataclass(frozen=True)
class Column:
    """One way of answering every row.

    Attributes:
        name: as the file has it.
        title: for people.
        clusters: a recipe's cluster to the one that takes its place.
        words: `key=value`, as on the command line, for every run.
        optional: likewise, left out where a recipe's model or data set has no such option.
    """

    name: str
    title: str
    clusters: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measure:
    """What a cell shows: a number computed from metrics of the row's runs, or the plan of one of them.

    Attributes:
        name: as the file has it.
        title: for people.
        unit: one of UNITS; plans have `none`.
        expression: over `run.metric` of the row's runs; None for a plan.
        plan_of: the run whose plan it is; None for a number.
        against: the run that has the published plan: where another one is chosen, the two are compared.
        better: `higher` or `lower`, where that can be said.
        shown: whether tables have it; what only serves pictures, claims and text needn't stand there.
    """

    name: str
    title: str
    unit: str = "none"
    expression: Expression | None = None
    plan_of: str | None = None
    against: str | None = None
    better: str | None = None
    shown: bool = True

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of the runs it takes."""
        if self.expression is not None:
            return tuple(dict.fromkeys(run for run, _ in self.expression.metrics))
        return (self.plan_of,) if self.plan_of is not None else ()


@dataclass(frozen=True)
class RunReference:
    """A run of a row.

    Attributes:
        words: as on the command line: a recipe, then `key=value`.
        engine: the kind of engine.
        seeds: one run per seed; None for the recipe's own.
        same: whether columns change nothing of it.
        largest: whether its minibatch is to be the largest that fits on its cluster.
    """

    words: tuple[str, ...]
    engine: str = "simulated"
    seeds: tuple[int, ...] | None = None
    same: bool = False
    largest: bool = False


@dataclass(frozen=True)
class Published:
    """A published value: a number, or a plan in the papers' notation.

    Attributes:
        value: the number or the plan.
        bound: whether it is the value itself or a bound of it.
    """

    value: float | str
    bound: Bound = "exact"


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: unique in the report.
        title: for people.
        runs: by name.
        published: by measure.
        where: in the source, if not where the report says.
        by_construction: by measure, why the cell can't come out otherwise.
        hypothesis: by measure, what the cell rests on.
        note: one sentence, or "".
        at: where the row stands: keys of its `for` or `at`, such as gpus: 4.
    """

    name: str
    title: str
    runs: Mapping[str, RunReference]
    published: Mapping[str, Published] = field(default_factory=dict)
    where: str = ""
    by_construction: Mapping[str, str] = field(default_factory=dict)
    hypothesis: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    at: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedClaim:
    """A sentence of the source that the cells confirm or don't.

    Attributes:
        text: the claim.
        where: in the source, if not where the report says.
        holds: over the cells of one column; None where it can't be tested here.
        untestable: why not; None where it can.
    """

    text: str
    where: str = ""
    holds: Expression | None = None
    untestable: str | None = None


@dataclass(frozen=True)
class Quoted:
    """A number that the report's text takes from its cells.

    Attributes:
        expression: over the cells of one column.
        column: which.
        unit: one of UNITS, in which it is written.
    """

    expression: Expression
    column: str
    unit: str


@dataclass(frozen=True)
class Picture:
    """One picture; which attributes count depends on the kind, see PICTURES.

    Attributes:
        kind: one of PICTURES.
        measures: of bars and scatter; of lines the one.
        bound: of bars and lines, the measure that none of them can exceed, of phases the metric; black; "" for none.
        x: of lines, the key of the rows' `at` along the axis.
        group: of lines, the key of the rows' `at` that has a line per value; "" for one line.
        runs: of curves, stages and a schedule; of phases, those of every row.
        metric: of curves and phases; of stages, what each stage has.
        over: of curves, what they are drawn over, one picture each.
        row: of curves, stages and a schedule, the row whose runs they are.
    """

    kind: str
    measures: tuple[str, ...] = ()
    bound: str = ""
    x: str = ""
    group: str = ""
    runs: tuple[str, ...] = ()
    metric: str = ""
    over: tuple[str, ...] = ()
    row: str = ""


@dataclass(frozen=True)
class Constant:
    """A number of a cluster that is sought.

    Attributes:
        name: as the file has it.
        cluster: short name, or path of the file.
        key: full key in that file, levels by name: `levels.server.ring`.
        low: the least it may be, as the file writes it: `0.5 GB/s`.
        high: the most.
        fitted_on: (row, measure) of the cells that it is fitted on.
    """

    name: str
    cluster: str
    key: str
    low: str
    high: str
    fitted_on: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Calibration:
    """Which constants are fitted on which cells; every other cell is a prediction.

    Attributes:
        column: in which they are used.
        constants: each with its cells.
    """

    column: str
    constants: tuple[Constant, ...]

    @property
    def cells(self) -> frozenset[tuple[str, str]]:
        """(row, measure) of all cells that something is fitted on."""
        return frozenset(cell for constant in self.constants for cell in constant.fitted_on)


@dataclass(frozen=True)
class Report:
    """A report that has passed validation.

    Attributes:
        name: the file's, without ending.
        path: the file.
        title: one line.
        paper: whose table it is; "" for a user's own.
        where: place in the paper.
        about: Markdown that stands before the tables, in pieces: as written, or quoted from the cells.
        columns: at least one.
        measures: in order, at least one.
        rows: in order, at least one.
        claims: in order.
        pictures: in order.
        calibration: None where nothing is fitted.
    """

    name: str
    path: Path
    title: str
    columns: tuple[Column, ...]
    measures: tuple[Measure, ...]
    rows: tuple[Row, ...]
    paper: str = ""
    where: str = ""
    about: tuple[str | Quoted, ...] = ()
    claims: tuple[PublishedClaim, ...] = ()
    pictures: tuple[Picture, ...] = ()
    calibration: Calibration | None = None

    def row(self, name: str) -> Row:
        """Return the row of a name."""
        return next(row for row in self.rows if row.name == name)

    def measure(self, name: str) -> Measure:
        """Return the measure of a name."""
        return next(measure for measure in self.measures if measure.name == name)

    def columns_of(self, measure: Measure) -> tuple[Column, ...]:
        """Return the columns in which a measure can differ: the first alone, where columns change none of its runs."""
        own = [row.runs[run] for row in self.rows for run in measure.runs if run in row.runs]
        return self.columns[:1] if own and all(run.same for run in own) else self.columns
