"""Collect the result of every run of a report: from MLflow, from results stored beside the report, or by running it.

Equal recipes run once. Each is recorded as a child of the report's own run as soon as it finishes, so an interrupted
report resumes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pipebench.cluster import LOCAL
from pipebench.errors import UserError, WorkersFailedError, printable_lines
from pipebench.recipe.engines import engine_kind
from pipebench.report.evaluate import CellOutcome
from pipebench.report.evaluated import EARLIER, KEPT, MLFLOW, Origin
from pipebench.report.kept import KeptResult, cluster_of, kept_results
from pipebench.report.recipes import ReportRun
from pipebench.run.identity import hardware, made_on
from pipebench.run.preflight_all import preflight_all
from pipebench.run.request import RunRequest
from pipebench.run.runner import RUNS, decide
from pipebench.run.suite import Suite
from pipebench.tracking.identity import recipe_hash, source_version
from pipebench.tracking.results import RecordedRuns
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.train.result import INTERRUPTED, RunResult

UNTRAINED = "not trained"
OnRun = Callable[[ReportRun], None]


@dataclass(frozen=True)
class RecipeOutcome:
    """The outcome of a recipe."""

    result: RunResult | None = None  # None if it couldn't run
    problem: str | None = None  # why it couldn't run
    reused: str | None = None  # MLFLOW, KEPT, or None if it ran for this report
    run_id: str = ""  # MLflow's; "" if not recorded here
    experiment_id: str = ""  # MLflow's; "" if not recorded here
    version: str = ""  # of the code that ran it
    ended: str = ""  # date and time; "" if unknown
    made: Mapping[str, str] = field(default_factory=dict)  # tree, versions and processor; empty if unknown


@dataclass
class Collection:
    """The runs of a report and their outcomes so far."""

    runs: Sequence[ReportRun]  # several may have the same recipe
    by_recipe: dict[str, RecipeOutcome] = field(default_factory=dict)  # known outcomes, by `recipe_hash`

    def __post_init__(self) -> None:
        self._keys = {id(each): recipe_hash(each.loaded) for each in self.runs}

    @property
    def recipes(self) -> dict[str, ReportRun]:
        """The first run of every recipe."""
        found: dict[str, ReportRun] = {}
        for each in self.runs:
            found.setdefault(self._keys[id(each)], each)
        return found

    @property
    def missing(self) -> dict[str, ReportRun]:
        """The first run of every recipe without an outcome."""
        return {key: each for key, each in self.recipes.items() if key not in self.by_recipe}

    def look_up(self, kept: Path) -> None:
        """Find outcomes recorded by this version of the code, or stored beside the report in folder `kept`.

        Measured durations depend on the machine: if several share an MLflow server, only results of machines like this
        one count.

        Raises:
            UserError: MLflow can't be queried or a stored file is invalid.
        """
        recorded, version = RecordedRuns(), source_version()
        for key, each in self.missing.items():
            recipe, device = each.loaded.recipe, each.loaded.cluster.device
            measured_here = engine_kind(recipe).measures or device == LOCAL
            found = recorded.newest(key, version, hardware() if measured_here else {})
            if found is not None:
                ended = _moment(found.ended_ms / 1000)
                self.by_recipe[key] = RecipeOutcome(
                    found.result, None, MLFLOW, found.run_id, found.experiment_id, version, ended
                )
        trained = {key: each for key, each in self.missing.items() if engine_kind(each.loaded.recipe).trains}
        known = [*kept_results(kept).values()] if trained else []
        for key, each in trained.items():
            match = next((one for one in known if one.answers(each.loaded)), None)
            if match is not None:
                self.by_recipe[key] = RecipeOutcome(
                    match.result, None, KEPT, version=match.version, ended=match.ended, made=match.made
                )

    def run_missing(self, tracking: Tracking, parent: RunLog, on_run: OnRun) -> bool:
        """Run the recipes that have no outcome; return False if interrupted.

        Args:
            tracking: where the runs are recorded.
            parent: the report's own run.
            on_run: called before each run.
        """
        for key, each in self.missing.items():
            on_run(each)
            outcome = run_one(each, tracking, parent)
            if outcome.result is not None and outcome.result.outcome == INTERRUPTED:
                return False
            self.by_recipe[key] = outcome
        return True

    def leave_out_training(self) -> None:
        """Leave out seeds that aren't trained yet; a run whose seeds are all left out gets a problem as its outcome."""
        left_out = {key for key, each in self.missing.items() if engine_kind(each.loaded.recipe).trains}
        places = {(each.row, each.run, each.column) for each in self.runs if self._keys[id(each)] not in left_out}
        self.by_recipe |= dict.fromkeys(left_out, RecipeOutcome(problem=UNTRAINED))
        self.runs = [
            each
            for each in self.runs
            if self._keys[id(each)] not in left_out or (each.row, each.run, each.column) not in places
        ]

    def check(self) -> None:
        """Check what the missing runs use before any starts; raises a RecipeError with everything that is missing."""
        preflight_all([each.loaded for each in self.missing.values()])

    def trained(self) -> Iterator[tuple[ReportRun, KeptResult]]:
        """Yield every trained result in the form in which it is stored."""
        for key, each in self.recipes.items():
            found = self.by_recipe.get(key)
            if found is not None and found.result is not None and engine_kind(each.loaded.recipe).trains:
                cluster = cluster_of(each.loaded)
                yield each, KeptResult(each.words, found.version, found.ended, cluster, found.result, found.made)

    def outcomes(self) -> dict[tuple[str, str, str], list[CellOutcome]]:
        """Return the outcomes of every run by row, run and column."""
        found: dict[tuple[str, str, str], list[CellOutcome]] = {}
        for each in self.runs:
            outcome = self.by_recipe[self._keys[id(each)]]
            cell = CellOutcome(_origin(each, outcome), outcome.result, outcome.problem)
            found.setdefault((each.row, each.run, each.column), []).append(cell)
        return found


def run_one(run: ReportRun, tracking: Tracking, parent: RunLog) -> RecipeOutcome:
    """Run a recipe as `pipebench run` would and return its outcome, a failure included."""
    loaded = run.loaded
    suite = Suite(tracking.store.suite, tuple(run.words[1:]), brief=True, draws=False)
    try:
        decision = decide(loaded, suite, alone=True)
        name = ", ".join(filter(None, (f"{run.row} {run.run}", run.column)))
        made = RUNS[loaded.recipe.engine.kind](RunRequest(loaded, name, suite, parent, decision), tracking)
        result, run_id = made.result, made.mlflow_run_id
    except UserError as error:
        # The recipe's name is removed, as the table shows it.
        lines = [line.removeprefix(f"{loaded.source}: ") for line in printable_lines(str(error))]
        return RecipeOutcome(problem="; ".join(lines))
    except WorkersFailedError as error:
        return RecipeOutcome(problem=str(error))
    now = _moment(datetime.now(UTC).timestamp())
    experiment_id = tracking.store.experiment_id if run_id else None
    return RecipeOutcome(result, None, None, run_id or "", experiment_id or "", source_version(), now, made_on())


def _origin(run: ReportRun, outcome: RecipeOutcome) -> Origin:
    loaded, result = run.loaded, outcome.result
    kind = engine_kind(loaded.recipe)
    return Origin(
        name=run.run,
        words=run.words,
        engine=kind.name,
        timing=result.timing if result is not None else "",
        data=_data(loaded.flat) if kind.trains else "",
        seed=loaded.recipe.train.seed,
        made=_made(outcome) if kind.trains else "",
        reused=outcome.reused,
        run_id=outcome.run_id,
        experiment_id=outcome.experiment_id,
        versions=f"pipebench {outcome.version}" if outcome.version else "",
        ended=outcome.ended,
    )


def _data(flat: Mapping[str, str]) -> str:
    """Return the data set of a run with its options."""
    section = {key.partition(".")[2]: value for key, value in flat.items() if key.startswith("dataset.")}
    name = section.pop("name", "null")
    name = section.pop("target", "its own") if name == "null" else name
    options = ", ".join(f"{key} {value}" for key, value in section.items() if value not in ("null", "0"))
    return f"{name} ({options})" if options else name


def _made(outcome: RecipeOutcome) -> str:
    """Return the code, versions and processor that trained a kept result; "" for other results."""
    if outcome.reused != KEPT:
        return ""
    if outcome.made:
        return ", ".join(value if name == "processor" else f"{name} {value}" for name, value in outcome.made.items())
    return f"{EARLIER}, pipebench {outcome.version}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
