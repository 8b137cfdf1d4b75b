"""What a report comes to: every cell with how it was obtained, scores, and which claims hold.

Plain data: what renders it computes nothing, and what computes it renders nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipebench.report.definition import Published, PublishedClaim, Report
from pipebench.train.result import RunResult

ALL, NOT_BY_CONSTRUCTION, NOT_FITTED = "all", "not by construction", "not fitted on"
YES, NO, UNTESTABLE = "yes", "no", "not testable here"
MISSED = "missed"  # a cell's problem, where a run didn't reach its target
MLFLOW, KEPT = "MLflow", "kept"


@dataclass(frozen=True)
class Origin:
    """How one result was obtained.

    Attributes:
        name: of the run, in its row.
        words: the command line that repeats it, from the recipe on.
        engine: kind of engine.
        timing: where durations came from, a sentence.
        data: what a run that trained was trained on, a sentence; "" of one that didn't.
        seed: of the run.
        reused: `MLflow` or `kept`; None where it ran for this.
        run_id: MLflow's, "" where it has none here.
        experiment_id: MLflow's, likewise.
        versions: of what it ran with, as it was recorded; "" where nobody knows.
        ended: date and time, "" likewise.
    """

    name: str
    words: tuple[str, ...]
    engine: str
    timing: str
    data: str
    seed: int
    reused: str | None = None
    run_id: str = ""
    experiment_id: str = ""
    versions: str = ""
    ended: str = ""


@dataclass(frozen=True)
class TableCell:
    """One value of a table.

    Attributes:
        row: name of the row.
        measure: name of the measure.
        column: name of the column.
        value: a number or a plan; None with a problem. Of several seeds the median.
        low: the least over seeds; None with one.
        high: the most.
        problem: why there is no value, such as `missed`; None where there is one.
        remarks: sentences on a value that stands all the same: it wouldn't fit in memory; 2 of 3 seeds.
        published: what the source says.
        fitted: a constant of this column was fitted on this cell.
        by_construction: why it can't come out otherwise.
        hypothesis: what it rests on.
        origins: of the results behind it.
        reason: of a plan that isn't the published one, why.
    """

    row: str
    measure: str
    column: str
    value: float | str | None = None
    low: float | None = None
    high: float | None = None
    problem: str | None = None
    remarks: tuple[str, ...] = ()
    published: Published | None = None
    fitted: bool = False
    by_construction: str | None = None
    hypothesis: str | None = None
    origins: tuple[Origin, ...] = ()
    reason: str | None = None

    @property
    def ratio(self) -> float | None:
        """Reproduced over published; None where either isn't a number, or what was published is a bound or 0."""
        if self.published is None or self.published.bound != "exact" or not self.published.value:
            return None
        if isinstance(self.value, str | None) or isinstance(self.published.value, str):
            return None
        return self.value / self.published.value


@dataclass(frozen=True)
class Score:
    """How near a column comes to what was published.

    Attributes:
        column: name of the column.
        measure: name of the measure.
        over: which cells: ALL, NOT_BY_CONSTRUCTION, NOT_FITTED (of what isn't by construction).
        cells: how many.
        geometric_mean_error: exp(mean |ln(reproduced / published)|) - 1.
        rank_correlation: Spearman's; None where there is no order: fewer than three cells, or all equal.
    """

    column: str
    measure: str
    over: str
    cells: int
    geometric_mean_error: float
    rank_correlation: float | None


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds.

    Attributes:
        claim: the claim.
        column: in which column; "" for all, where it can't be tested.
        answer: YES, NO or UNTESTABLE.
        reason: what it came to, or why it can't be tested.
    """

    claim: PublishedClaim
    column: str
    answer: str
    reason: str


@dataclass(frozen=True)
class Evaluated:
    """A report and all it came to.

    Attributes:
        report: with the rows that were asked for.
        cells: of every row, column and measure that has the runs for it; in this order.
        scores: by column and measure.
        verdicts: by claim and column.
        results: by (row, run, column): one per seed; what couldn't run has none.
        server: where MLflow shows the runs, for links; "" where nobody knows.
        drawings: by (row, run), the pipelines that the report's pictures show as text, as `pipebench draw` prints them.
        command: the command line that makes it all again.
        about: the report's text, with what it quotes.
    """

    report: Report
    cells: tuple[TableCell, ...]
    scores: tuple[Score, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    results: Mapping[tuple[str, str, str], tuple[RunResult, ...]] = field(default_factory=dict)
    server: str = ""
    drawings: Mapping[tuple[str, str], str] = field(default_factory=dict)
    command: str = ""
    about: str = ""

    def cell(self, row: str, measure: str, column: str) -> TableCell | None:
        """Return a cell; None where the row hasn't the runs for it."""
        found = (each for each in self.cells if (each.row, each.measure, each.column) == (row, measure, column))
        return next(found, None)
