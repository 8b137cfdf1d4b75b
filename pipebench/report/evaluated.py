"""An evaluated report as plain data: cells with their origins, scores, and verdicts on claims."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pipebench.report.definition import Published, PublishedClaim, Report
from pipebench.train.result import RunResult

ALL, NOT_BY_CONSTRUCTION, NOT_FITTED = "all", "not by construction", "not fitted on"
NOT_CHOSEN = "nothing chosen in view of them"
CONSTANT = "geometric mean of the fitted cells"  # in place of a column: a baseline
YES, NO, UNTESTABLE = "yes", "no", "not testable here"
LEFT_OUT = "rows left out"  # the answer to claims about rows that the report leaves out
MLFLOW, KEPT = "MLflow", "kept"  # where a reused result was found
EARLIER = "an earlier release, which named no tree"  # the code that trained a result


@dataclass(frozen=True)
class Origin:
    """The origin of one result."""

    name: str  # of the run, in its row
    words: tuple[str, ...]  # command line that repeats it, from the recipe on
    engine: str
    timing: str  # source of durations, a sentence
    data: str  # training data, a sentence; "" if nothing was trained
    seed: int
    made: str = ""  # tree, versions and processor that trained a kept result, or EARLIER; "" for other results
    reused: str | None = None  # MLFLOW, KEPT, or None if it ran for this report
    run_id: str = ""  # MLflow's; "" if not recorded here
    experiment_id: str = ""  # MLflow's; "" if not recorded here
    versions: str = ""  # as recorded; "" if unknown
    ended: str = ""  # date and time; "" if unknown


@dataclass(frozen=True)
class TableCell:
    """One cell of a table, named by row, measure and column."""

    row: str
    measure: str
    column: str
    # A number (the median over seeds; a missed target counts as an infinite time) or a plan; None with a problem
    value: float | str | None = None
    low: float | None = None  # minimum over the seeds that reached their target; None with one seed
    high: float | None = None  # maximum over the seeds that reached their target; None with one seed
    problem: str | None = None  # why there is no value, such as `missed`
    remarks: tuple[str, ...] = ()  # sentences on a valid value: doesn't fit in memory; 2 of 3 seeds
    published: Published | None = None
    fitted: bool = False  # whether a constant of this column was fitted on it
    by_construction: str | None = None  # why no other value is possible
    hypothesis: str | None = None  # the assumption behind it
    chosen: str | None = None  # what was chosen knowing its result
    origins: tuple[Origin, ...] = ()
    reason: str | None = None  # why a plan differs from the published one

    @property
    def ratio(self) -> float | None:
        """Reproduced / published; None if either isn't a number, or the published one is a bound or 0."""
        if self.published is None or self.published.bound != "exact" or not self.published.value:
            return None
        if isinstance(self.value, str | None) or isinstance(self.published.value, str):
            return None
        return self.value / self.published.value


@dataclass(frozen=True)
class Score:
    """Agreement of a column's cells with the published values."""

    column: str  # or CONSTANT
    measure: str  # "" for the numbers that claims state
    over: str  # ALL, NOT_BY_CONSTRUCTION, NOT_FITTED or NOT_CHOSEN: each a subset of the one before
    cells: int  # number of cells
    geometric_mean_error: float  # exp(mean |ln(reproduced / published)|) - 1
    rank_correlation: float | None  # Spearman's; None with fewer than three cells, or if all are equal


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds in a column."""

    claim: PublishedClaim
    column: str  # "" for all, if untestable or left out
    answer: str  # YES, NO, UNTESTABLE or LEFT_OUT
    reason: str  # values that decided it, or why it is untestable
    value: float | None = None  # of a claimed number

    @property
    def ratio(self) -> float | None:
        """Reproduced / published; None for a claim without a number."""
        number = self.claim.number
        return None if self.value is None or number is None else self.value / number.published


@dataclass(frozen=True)
class Evaluated:
    """A report with its results."""

    report: Report  # with the selected rows only
    cells: tuple[TableCell, ...]  # of every row, column and measure with its runs, in this order
    scores: tuple[Score, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    # By (row, run, column), one result per seed that ran
    results: Mapping[tuple[str, str, str], tuple[RunResult, ...]] = field(default_factory=dict)
    server: str = ""  # MLflow's address for links; "" if unknown
    # By (row, run), pipelines as `pipebench draw` prints them
    drawings: Mapping[tuple[str, str], str] = field(default_factory=dict)
    command: str = ""  # reproduces the report
    about: str = ""  # the report's text, quoted numbers filled in
    made: str = ""  # when, and by which code; "" if unknown

    @cached_property
    def _by_place(self) -> dict[tuple[str, str, str], TableCell]:
        return {(cell.row, cell.measure, cell.column): cell for cell in self.cells}

    def cell(self, row: str, measure: str, column: str) -> TableCell | None:
        """Return a cell; None if the row lacks its runs."""
        return self._by_place.get((row, measure, column))
