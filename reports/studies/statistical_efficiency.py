"""Epochs to a target under every weight policy, and with large minibatches: `nox -s efficiency`, or this as a program.

The output is `statistical_efficiency.md`; pictures are drawn beside it. Runs are among the stored results of all
reports (`reports/kept/`), which other pages read and `nox -s kept` repeats; runs with the learning rates that were
tried are stored in `statistical_efficiency_runs/`. A stored run isn't repeated unless its recipe changes, so that an
interrupted study resumes and the page is made without training.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipebench.formats import UNKNOWN, number, ratio, seconds
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.report.catalog import reports_folder
from pipebench.report.kept import KeptResult, keep, kept_results
from pipebench.report.recipes import ReportRun
from pipebench.train.result import RunResult
from reports.studies import kept_runs
from reports.studies.efficiency_pictures import draw
from reports.studies.efficiency_texts import HEAD, NOTES, OTHER, SAID
from reports.studies.kept import fresh
from reports.studies.markdown import table
from reports.studies.seeds import in_range, middle

RATES = Path(__file__).parent / "statistical_efficiency_runs"
# Runs of the same recipes on another processor; two of them also by the tree `AGREES`, which made most stored results.
ELSEWHERE = Path(__file__).parent / "statistical_efficiency_elsewhere.json"
AGREES = "13dfba95439c"
SEEDS = (0, 1, 2, 3, 4)
METRICS = {"vgg16": "top1", "gnmt8": "bleu"}
# Recipes of recipes/steep/, in the order of the page.
MODES = (
    "single", "dp", "pipedream", "vertical-sync", "no-stashing", "pipedream-2bw", "dp-asp", "spectrain", "xpipe",
    "pipemare",
)  # fmt: skip
# Not for gnmt8: minibatches 16 times as large leave so few updates per epoch that it would hardly learn.
LARGE = {"vgg16": ("dp-large", "dp-large-lars"), "gnmt8": ()}
# Learning rates that one worker tries, with seed 0; a model's rate is the best of them.
GRIDS: dict[tuple[str, str], tuple[float, ...]] = {
    ("vgg16", "single"): (0.005, 0.01, 0.02, 0.04),
    ("vgg16", "single-lars"): (0.125, 0.5, 2.0, 8.0),
    ("gnmt8", "single"): (0.002, 0.004, 0.008, 0.016),
}


@dataclass(frozen=True)
class Run:
    """One training run of the study."""

    model: str  # `vgg16` or `gnmt8`
    mode: str  # a recipe of its folder in `recipes/steep/`
    seed: int  # of the run
    lr: float | None = None  # a learning rate that is tried; None for the recipe's

    @property
    def loaded(self) -> LoadedRecipe:
        """Its recipe."""
        return _loaded(self.words)

    @property
    def words(self) -> tuple[str, ...]:
        """Its command line, as reports have it: the recipe and overrides."""
        rate = () if self.lr is None else (f"train.optimizer.lr={self.lr}",)
        return f"steep/{self.model}/{self.mode}", "engine.kind=virtual", f"train.seed={self.seed}", *rate

    @property
    def name(self) -> str:
        """Its name, also of its file if a learning rate is tried."""
        return f"{self.model}-{self.mode}-{self.seed}{'' if self.lr is None else f'-lr{self.lr:g}'}"

    @property
    def kept(self) -> KeptResult | None:
        """Its result in `reports/kept/`; None if there is none of today's recipe that names its tree."""
        return _answer(self.words)

    @property
    def outcome(self) -> "Outcome | None":
        """Its outcome; None if no result of today's recipe is stored."""
        if self.lr is None:
            kept = self.kept
            per_epoch = int(self.loaded.flat["dataset.num_train"])
            return None if kept is None else outcome_of(kept.result, METRICS[self.model], per_epoch)
        found = kept_runs.kept(RATES / f"{self.name}.json", self.loaded.recipe)
        return None if found is None else Outcome(**found["outcome"])


@dataclass(frozen=True)
class Outcome:
    """The result of a run, as the study uses it."""

    outcome: str  # `reached`, `missed` or `diverged`
    epochs: float | None  # to the target; None if it wasn't reached
    clock_s: float | None  # virtual seconds to the target, evaluations included; None if it wasn't reached
    samples_per_update: float  # of the input stage
    points: list[list[float]]  # epochs, virtual seconds and the metric at every evaluation


def study() -> Iterator[Run]:
    """Yield every run: first those that learning rates are chosen by, then seed by seed."""
    for (model, mode), rates in GRIDS.items():
        yield from (Run(model, mode, 0, lr) for lr in rates)
    for seed in SEEDS:
        for model in METRICS:
            yield from (Run(model, mode, seed) for mode in modes_of(model))


def modes_of(model: str) -> tuple[str, ...]:
    """Return the recipes of a model that the study trains."""
    return (*MODES, *LARGE[model])


def train(run: Run) -> Outcome:
    """Train a run, store the result, and return the outcome."""
    made = fresh(ReportRun("", run.words[0], "", run.words, run.loaded))
    outcome = outcome_of(made.result, METRICS[run.model], int(run.loaded.flat["dataset.num_train"]))
    if run.lr is None:
        keep(reports_folder(), made, run.loaded)
        _kept.cache_clear()
    else:
        kept_runs.keep(RATES / f"{run.name}.json", run.loaded.recipe, made=made.made, outcome=asdict(outcome))
    return outcome


@functools.cache
def _loaded(words: tuple[str, ...]) -> LoadedRecipe:
    """Return the recipe of a command line; cached, since tables, sentences and pictures load each many times."""
    return load(words[0], words[1:])


@functools.cache
def _answer(words: tuple[str, ...]) -> KeptResult | None:
    """Return the stored result of a command line if its recipe is still the one that was trained."""
    found = _kept().get(words)
    return found if found is not None and found.answers(_loaded(words)) else None


@functools.cache
def _kept() -> dict[tuple[str, ...], KeptResult]:
    """Return the stored results of all reports that name their tree, by command line."""
    return {each.words: each for each in kept_results(reports_folder()).values() if each.made}


def outcome_of(result: RunResult, metric: str, per_epoch: int) -> Outcome:
    """Return the outcome of a result; `per_epoch` are the training samples of an epoch."""
    points = [
        [point.samples / per_epoch, point.clock_s, float(point.metrics[metric])]
        for point in result.points
        if metric in point.metrics
    ]
    metrics = result.metrics
    return Outcome(
        result.outcome,
        metrics.get("epochs_to_target"),
        metrics.get("time_to_accuracy_s"),
        metrics["samples_per_update"],
        points,
    )


def train_missing(runs: Sequence[Run], tell: Callable[[str], Any]) -> None:
    """Train the runs that aren't stored yet, one after another; `tell` prints progress."""
    for run in runs:
        if run.outcome is None:
            made = train(run)
            tell(f"{run.name}: {made.outcome}, {made.epochs} epochs")


def elsewhere_rows() -> list[list[str]]:
    """Return a row per mode that was also trained on another processor: epochs of the same seeds, here and there."""
    runs = [run for run in json.loads(ELSEWHERE.read_text()) if run["made"]["tree"] != AGREES]
    rows = []
    for model, mode in dict.fromkeys((run["model"], run["mode"]) for run in runs):
        pairs = [
            (made, run)
            for run in runs
            if (run["model"], run["mode"]) == (model, mode)
            and (made := Run(model, mode, run["seed"]).outcome) is not None
        ]
        kept, there = [made.epochs for made, _ in pairs], [run["epochs"] for _, run in pairs]
        if pairs:
            first = Run(model, mode, 0).kept
            by = [_made_by({} if first is None else first.made), _made_by(pairs[0][1]["made"])]
            alike = sum(one == other for one, other in zip(kept, there, strict=True))
            rows.append([f"{model} {mode}", str(len(pairs)), *_listed(kept, by[0]), *_listed(there, by[1]), str(alike)])
    return rows


def _listed(epochs: Sequence[float | None], by: str) -> tuple[str, str]:
    """Return the epochs of all seeds, as text, and `by`, what trained them."""
    return ", ".join("missed" if each is None else number(each) for each in epochs), by


def _made_by(made: Mapping[str, Any]) -> str:
    """Return the tree and the processor that trained a result, of the facts that it records."""
    return f"{made.get('tree', UNKNOWN)}, {str(made.get('processor', UNKNOWN)).partition('(')[0]}"


def trees_that_agree() -> tuple[int, int]:
    """Return how many runs two trees trained on the other processor, and in how many the curves are equal."""
    curves: dict[tuple[str, str, int], list[list[float]]] = {}
    for run in json.loads(ELSEWHERE.read_text()):
        curves.setdefault((run["model"], run["mode"], run["seed"]), []).append(run["curve"])
    twice = [each for each in curves.values() if len(each) == 2]
    return len(twice), sum(one == other for one, other in twice)


def chosen_rate(model: str, mode: str) -> float:
    """Return the learning rate with the fewest epochs to the target, the smallest of several."""
    tried = [(lr, Run(model, mode, 0, lr).outcome) for lr in GRIDS[model, mode]]
    reached = [(made.epochs, lr) for lr, made in tried if made is not None and made.epochs is not None]
    return min(reached)[1]


def rate_rows() -> list[list[str]]:
    """Return a row per learning rate that was tried."""
    return [
        [
            model,
            mode,
            f"{lr:g}" if lr != chosen_rate(model, mode) else f"**{lr:g}**",
            *_time_cells([_stored(model, mode, 0, lr)]),
        ]
        for (model, mode), rates in GRIDS.items()
        for lr in rates
    ]


def mode_rows(model: str) -> list[list[str]]:
    """Return a row per mode of a model."""
    rows = []
    base = {mode: _medians(_of(model, mode)) for mode in ("single", "dp")}
    for mode in modes_of(model):
        made = _of(model, mode)
        epochs, clock_s = _medians(made)
        best = statistics.median(max(value for _, _, value in each.points) for each in made)
        rows.append(
            [
                mode, number(made[0].samples_per_update), _missed(made), *_time_cells(made),
                ratio(_over(epochs, base["single"][0])), ratio(_over(epochs, base["dp"][0])),
                ratio(_over(clock_s, base["dp"][1])), number(best), number(statistics.median(_at_least(made))),
            ]
        )  # fmt: skip
    return rows


@dataclass(frozen=True)
class Summary:
    """Numbers of a mode in the page's sentences."""

    missed: str  # seeds that missed the target, of how many
    over_stashing: str  # median epochs over those of PipeDream


def summaries(model: str) -> dict[str, Summary]:
    """Return the numbers of each mode of a model that the page's sentences use."""
    return {mode: Summary(_missed(_of(model, mode)), _over_stashing(model, mode)) for mode in modes_of(model)}


def _missed(made: Sequence[Outcome]) -> str:
    return f"{sum(each.epochs is None for each in made)} of {len(made)}"


def _over_stashing(model: str, mode: str) -> str:
    own, base = (_medians(_of(model, way))[0] for way in (mode, "pipedream"))
    return ratio(_over(own, base))


def _of(model: str, mode: str) -> list[Outcome]:
    """Return the outcomes of the seeds that are stored."""
    found = [made for made in (Run(model, mode, seed).outcome for seed in SEEDS) if made is not None]
    if not found:
        raise FileNotFoundError(f"nothing of {model} under {mode} is kept: train it first")
    return found


def _stored(model: str, mode: str, seed: int, lr: float | None = None) -> Outcome:
    run = Run(model, mode, seed, lr)
    made = run.outcome
    if made is None:
        raise FileNotFoundError(f"{run.name} isn't there, or another recipe made it: train it first")
    return made


def _at_least(made: Sequence[Outcome]) -> list[float]:
    """Return every seed's epochs to the target, or all of its epochs if it missed the target."""
    return [each.points[-1][0] if each.epochs is None else each.epochs for each in made]


def _time_cells(made: Sequence[Outcome]) -> list[str]:
    """Return cells for epochs and virtual time to the target: the median and, if seeds differ, the range."""
    if _medians(made)[0] is None:
        return [", ".join(dict.fromkeys(each.outcome for each in made if each.epochs is None)), UNKNOWN]
    return [in_range([each.epochs for each in made], number), in_range([each.clock_s for each in made], seconds)]


def _medians(made: Sequence[Outcome]) -> tuple[float | None, float | None]:
    """Return median epochs and seconds; None if half of the seeds or more missed the target."""
    return middle([each.epochs for each in made]), middle([each.clock_s for each in made])


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def pictures(folder: Path) -> list[Path]:
    """Draw the curves of every model, against epochs and against virtual time; return the files."""
    drawn = []
    for model, metric in METRICS.items():
        curves = {mode: [each.points for each in _of(model, mode)] for mode in modes_of(model)}
        target = Run(model, "single", 0).loaded.recipe.train.target
        assert target is not None
        for axis, reference in (("epochs", "single"), ("virtual time", "dp")):
            path = folder / f"statistical_efficiency_{model}_{axis.split()[-1]}.png"
            draw(curves, reference, axis, metric, target.value, path)
            drawn.append(path)
    return drawn


def page() -> str:
    """Return the report."""
    heads = ["mode", "samples per update", "missed", "epochs", "virtual time to target"]
    heads += ["epochs / single's", "epochs / dp's", "time / dp's", "best", "epochs, misses in full"]
    rates = ["model", "recipe", "rate", "epochs", "virtual time to target"]
    parts = [HEAD, table(rates, rate_rows()), SAID]
    for model, metric in METRICS.items():
        target = Run(model, "single", 0).loaded.recipe.train.target
        assert target is not None
        parts += [f"\n## {model}: {metric} {target.value:g}\n", table(heads, mode_rows(model)), ""]
        for axis in ("epochs", "time"):
            parts += [f"![{metric} of {model} against {axis}](statistical_efficiency_{model}_{axis}.png)\n"]
    num_twice, num_equal = trees_that_agree()
    machine = json.loads(ELSEWHERE.read_text())[0]["made"]
    elsewhere = OTHER.format(twice=num_twice, equal=num_equal, agrees=AGREES, **machine)
    heads = ["runs", "seeds", "epochs, kept", "by", "epochs elsewhere", "by", "seeds with as many"]
    notes = NOTES.format(**{model: summaries(model) for model in METRICS})
    return "\n".join([*parts, notes, elsewhere, table(heads, elsewhere_rows()), "", *trained_by()])


def trained_by() -> list[str]:
    """Return lines that list the trees and machines that trained the runs, and how many runs are missing."""
    found = [(run, run.kept) for run in study() if run.lr is None]
    ways: dict[tuple[str, str], list[str]] = {}
    for run, kept in found:
        if kept is not None:
            ways.setdefault((kept.made["tree"], _machine(kept)), []).append(f"{run.model} {run.mode}")
    lines = [
        f"- {len(runs)} by tree {tree} with {machine}: {', '.join(sorted({*runs}))}"
        for (tree, machine), runs in sorted(ways.items(), key=lambda each: -len(each[1]))
    ]
    done = sum(kept is not None for _, kept in found)
    missing = (
        [f"- {len(found) - done} are not there yet: *missed* says of how many seeds."] if done < len(found) else []
    )
    return [f"{done} runs of modes, as `nox -s kept` repeats them:", "", *lines, *missing]


def _machine(kept: KeptResult) -> str:
    return f"torch {kept.made['torch']}, python {kept.made['python']}, {kept.made['processor']}"


def main() -> None:
    """Train what is missing and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="train only runs whose name begins with this, and print no page")
    given = parser.parse_args()
    runs = [run for run in study() if run.name.startswith(given.only)]
    train_missing(runs, lambda line: print(line, file=sys.stderr, flush=True))
    if not given.only:
        pictures(Path(__file__).parents[1])
        print(page())


if __name__ == "__main__":
    main()
