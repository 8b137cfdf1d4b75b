"""The answers of the commands `run`, `compare`, `plan`, `profile` and `largest`: text, JSON, rows and a figure."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from pipebench.errors import UserError, print_notice, printable
from pipebench.formats import a_or_an, listed, num_bytes, percent
from pipebench.profile.model import Profile
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import LoadedRecipe
from pipebench.show.comparison import groups
from pipebench.show.console import print_comparison, print_differences, print_seeds, print_summary
from pipebench.show.differences import differences, labelled
from pipebench.show.plan_answer import PlanFindings, plan_data, plan_summary
from pipebench.show.plan_report import print_modes, print_plan
from pipebench.show.profile_report import print_profile
from pipebench.show.shown import Shown
from pipebench.show.tables import new_table, print_table
from pipebench.show.verdict import verdict
from pipebench.tracking.rebuilt import LACKS
from pipebench.tracking.results import Recorded, find_runs, runs_of
from pipebench.tracking.summary import summarise_seeds
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pipebench.simulate.timeline import Timeline
    from pipebench.train.largest_minibatch import Trial

_NAMED = 3  # runs in a remark
_WORST_FIRST = (INTERRUPTED, DIVERGED, MISSED, COMPLETED, REACHED)


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """One run of one recipe.

    Attributes:
        result: outcome, metrics, curves, stages.
        mlflow_run_id: MLflow's id; None if MLflow lacks the run.
        timeline: of the first minibatches; None for a run in other processes.
        picture: the timeline as text.
        link: how to open the run's record.
        record: the folder of the record; unless the run has a folder of its own, it is removed once MLflow has it.
    """

    result: RunResult
    mlflow_run_id: str | None = None
    timeline: "Timeline | None" = None
    picture: str = ""
    link: str = ""
    record: Path | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The final numbers, by the names of the reference of metrics."""
        return dict(self.result.metrics)

    def to_dict(self) -> dict[str, Any]:
        """Return the result's fields and MLflow's id of the run."""
        return {"mlflow_run_id": self.mlflow_run_id, **asdict(self.result)}

    def rows(self) -> list[dict[str, Any]]:
        """Return the curves: a row per evaluation or logging step."""
        return [{"samples": point.samples, "clock_s": point.clock_s, **point.metrics} for point in self.result.points]

    def print_to(self, console: Console) -> None:
        """Print the summary."""
        print_summary(self.result, self.picture, self.link, console)

    def figure(self) -> "Figure":
        """Return the timeline of the first minibatches; the curves if the run was in other processes."""
        drawing = _figures()
        made: Figure = (
            drawing.curves_figure([self.result]) if self.timeline is None else drawing.timeline_figure(self.timeline)
        )
        return made


@dataclass(frozen=True, repr=False)
class RunComparison(Shown):
    """Runs side by side.

    Attributes:
        runs: in the order of the request.
        link: how to open the comparison's record.
        tells_differences: whether the keys in which the recipes differ are printed, too.
    """

    runs: tuple[Run, ...]
    link: str = ""
    tells_differences: bool = False

    @property
    def results(self) -> list[RunResult]:
        """The runs' results."""
        return [run.result for run in self.runs]

    @property
    def exit_code(self) -> int:
        """The exit code of the worst run."""
        return min(self.results, key=lambda result: _WORST_FIRST.index(result.outcome)).exit_code

    def to_dict(self) -> dict[str, Any]:
        """Return the runs, the table's rows, the sentences below it, and the keys in which their recipes differ."""
        return {
            "runs": [run.to_dict() for run in self.runs],
            "rows": self.rows(),
            "verdict": [line for group in groups(self.results) for line in verdict(group)],
            "differences": {key: texts for key, *texts in differences(self.results)},
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per recipe: medians over its seeds, and last the keys that its sweep varies."""
        found = groups(self.results)
        named = len(found) > 1
        return [
            {**({"group": group.title} if named else {}), **row.to_dict(), **entry.varied}
            for group in found
            for row, entry in zip(group.rows, group.entries, strict=True)
        ]

    def print_to(self, console: Console) -> None:
        """Print a row per recipe; for the seeds of a single recipe their spread."""
        results = self.results
        if self.tells_differences:
            print_differences(results, differences(results), console)
        if len(results) > 1 and len({result.name for result in results}) == 1 and not self.tells_differences:
            print_seeds(results[0].name, results, summarise_seeds(results), console)
        else:
            print_comparison(results, self.link, console)

    def figure(self) -> "Figure":
        """Return all curves, a panel per metric; bars for simulations, which have none."""
        made: Figure = _figures().curves_figure(self.results)
        return made


def recorded(references: Sequence[str], folders: Sequence[Path]) -> RunComparison:
    """Return recorded runs side by side.

    If references name comparisons, such as an interrupted sweep and its continuation, a run in several of them counts
    once, and an interrupted run does not count if its recipe was run again.

    Args:
        references: runs or comparisons; a single one must be a comparison and stands for all of its runs.
        folders: records on this disk.

    Raises:
        UserError: a reference matches no run or several, or the same run as another reference; or the only one is a
            run.
    """
    found = find_runs(references, folders) if len(references) > 1 else runs_of(references[0], folders)
    if partly := [run for run in found if run.lacks]:
        names = listed([run.text for run in partly], _NAMED)
        text = f"{names}: compared by what MLflow has, without {LACKS}: result.json can't be read ({partly[0].lacks})"
        print_notice(text)
    are_runs = 1 < len(found) == len(references)
    ids = [run.run_id for run in found]
    for index, run_id in enumerate(ids):
        if are_runs and run_id in ids[:index]:
            raise UserError(
                f"run: {references[index]!r} and {references[ids.index(run_id)]!r} are the same run, {run_id}"
            )
    found = found if are_runs else _without_interrupted({run.run_id: run for run in found}.values())
    runs = tuple(Run(result, each.run_id) for result, each in zip(labelled(found), found, strict=True))
    return RunComparison(runs, tells_differences=are_runs)


def _without_interrupted(runs: Iterable[Recorded]) -> list[Recorded]:
    """Return the runs without the interrupted ones whose recipe another of the runs has completed."""
    ended = [run.result.recipe for run in runs if run.result.outcome != INTERRUPTED]
    return [run for run in runs if run.result.outcome != INTERRUPTED or run.result.recipe not in ended]


@dataclass(frozen=True, repr=False)
class PlanAnswer(Shown):
    """The best plan of a mode, and of the other modes.

    Attributes:
        answer: the planner's request and results.
    """

    answer: PlanFindings

    def to_dict(self) -> dict[str, Any]:
        """Return everything; the page on the planner lists the keys."""
        return plan_data(self.answer)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per mode, the plan asked for first."""
        compared = self.answer.comparison
        return [plan_summary(self.answer, found) for found in (compared.best, *compared.others)]

    def print_to(self, console: Console) -> None:
        """Print the plan, the reasons for it and the other modes."""
        print_plan(self.answer, console)
        print_modes(self.answer, console)

    def figure(self) -> "Figure":
        """Return the layers with the cuts, and how each stage spends its time."""
        made: Figure = _figures().plan_figure(self.answer)
        return made


@dataclass(frozen=True, repr=False)
class ModelProfile(Shown):
    """The costs of every layer of a model.

    Attributes:
        name: of the recipe or the file.
        profile: at every size that is needed.
        num_samples: the size that is shown.
        show_all: whether a long model's text shows every layer.
    """

    name: str
    profile: Profile
    num_samples: int
    show_all: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the profile in the form of its file."""
        made: dict[str, Any] = json.loads(write_profile(self.profile))
        return made

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per layer; the last is the loss."""
        return [
            {**asdict(row), "parameter_bytes": row.parameter_bytes} for row in self.profile.layers[self.num_samples]
        ]

    def print_to(self, console: Console) -> None:
        """Print the layers as a table."""
        print_profile(self.name, self.profile, self.num_samples, show_all=self.show_all, console=console)

    def figure(self) -> "Figure":
        """Return time, activations and parameters of every layer."""
        made: Figure = _figures().profile_figure(self.profile, self.num_samples, self.name)
        return made


@dataclass(frozen=True, repr=False)
class LargestMinibatch(Shown):
    """The largest minibatch that fits in memory.

    Attributes:
        loaded: the recipe.
        found: the size.
        trials: one for every size that was tried.
    """

    loaded: LoadedRecipe
    found: "Trial"
    trials: tuple["Trial", ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the size, the device's memory and all trials."""
        return {
            "name": self.loaded.recipe.name,
            "minibatch_size": self.found.minibatch_size,
            "memory_limit_bytes": self.loaded.cluster.memory_bytes,
            "trials": self.rows(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per size that was tried."""
        return [asdict(trial) for trial in self._by_size()]

    def print_to(self, console: Console) -> None:
        """Print the size and a row per trial."""
        cluster = self.loaded.cluster
        assert cluster.memory_bytes is not None
        sentence = (
            f"{self.loaded.recipe.name}: {self.found.minibatch_size} samples per minibatch are the most of those tried "
            f"that fit in the {num_bytes(cluster.memory_bytes)} of {a_or_an(cluster.device)}"
        )
        if all(trial.fits for trial in self.trials):
            sentence += "; the limit is the number of training samples, too few for a larger size, not memory"
        console.print(Text(printable(sentence)), soft_wrap=True)
        table = new_table("minibatch", "fullest worker, simulated", "of a device", "", left=0)
        for trial in self._by_size():
            peak = trial.peak_bytes
            cells = ("no plan fits", "") if peak is None else (num_bytes(peak), percent(peak / cluster.memory_bytes))
            table.add_row(f"{trial.minibatch_size:,}", *cells, "fits" if trial.fits else "")
        print_table(console, table, indent=2, left=0)

    def _by_size(self) -> list["Trial"]:
        return sorted(self.trials, key=lambda each: each.minibatch_size)


def _figures() -> ModuleType:
    from pipebench.show import figures  # late: matplotlib

    return figures
