"""Train the small recipes in every mode and print the results: `nox -s zoo`, or this module as a program.

The output is `small_zoo.md`. Every run is stored in `small_zoo_runs/` beside this file and isn't repeated unless its
recipe changes, so that an interrupted study resumes. All runs get the times of today's simulator, without training.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipebench.formats import num_bytes, seconds
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.recipe.make import make_dataset
from pipebench.train.prepare import prepare
from pipebench.train.result import RunResult
from pipebench.train.simulated import simulate_epoch
from pipebench.typed_json import read
from pipebench.zoo.captions import Captions
from pipebench.zoo.language import Text
from pipebench.zoo.translation import Translation, copy_baseline
from reports.studies import clocks, kept_runs
from reports.studies.markdown import table
from reports.studies.ngram import Trigram
from reports.studies.seeds import in_range, middle

RESULTS = Path(__file__).parent / "small_zoo_runs"
MODELS = ("vgg16", "resnet50", "alexnet", "gnmt8", "gnmt16", "awd_lm", "s2vt")
MODES = ("single", "dp", "model", "gpipe", "pipedream", "pipedream-replicated")
THREE = (0, 1, 2)
OF_THREE_SEEDS = ("vgg16", "gnmt8")
# model and gpipe make the same updates as single, so they take the same epochs. One of each is trained nevertheless, as
# a check. With BatchNorm, whose statistics are a microbatch's, gpipe trains differently and is always trained.
CHECKS = (("vgg16", "model"), ("gnmt8", "gpipe"))
WITH_BATCH_NORM = ("vgg16", "resnet50", "alexnet")

HEAD = """# The small zoo: every model and mode, trained here

`nox -s zoo` makes this page: it trains what isn't in `reports/studies/small_zoo_runs/` yet,
a run per core, one thread each.
The recipes are those of `recipes/small/`; clock and bytes are those of four V100s of Cluster-A, computed, while
accuracy is of real training with exact weight versions. All modes of a model share its optimizer, learning rate,
schedule and minibatch per worker: data parallelism takes fewer, larger updates at the same rate here, as does a stage
with replicas, and nothing is tuned to make up for that. Where the rate is constant other modes may take two or three
times as many epochs as `single`, which changes nothing but how long they try.

## Targets

A target is what `single` reaches after two thirds of its epochs, the median of three seeds, rounded to the easier
side of a round figure; it was fixed before any other mode ran. `single` is run to its last epoch for this; its epochs
and times below are those of the first evaluation that reaches the target. Schedules were chosen with earlier runs of
all modes in view: with a cosine that ends where `single` ends, data parallelism ended short of the target on three
models and straight PipeDream on two, so five models have a constant rate now, and targets made anew.
"""
NOTES = """
## What it says

- Straight PipeDream is first on six of the seven models, on four of these by one seed. On `s2vt` stale gradients cost
  it nearly twice the epochs, and data parallelism is first.
- Replicating the first stage reduces staleness and the number of updates: as many epochs as straight or more, except on
  `s2vt`.
- Data parallelism takes a quarter of the updates per epoch and up to twice the epochs at the rate of one worker.
- GPipe is slower than one worker here: such narrow models spend their time on a V100 launching kernels, and four
  microbatches launch four times as many.

## How to read it

Time to accuracy is on the virtual clock, with and without the forward passes of evaluations; text that models write
for BLEU and METEOR costs no virtual time. Where three seeds ran: the median, and the
range. *single's*: `model` and `gpipe` take `single`'s updates, so its epochs too; their times are simulated. Rows of
these modes without that word were trained as a check. `gpipe` on a model with BatchNorm is always trained: its
statistics are those of a microbatch. "wall" is the whole command here, beside another one.
"""


@dataclass(frozen=True)
class Run:
    """One training run of the study."""

    model: str
    mode: str
    seed: int

    @property
    def loaded(self) -> LoadedRecipe:
        """The recipe; `single` trains to its last epoch even if it reaches the target, since targets derive from it."""
        overrides = [f"train.seed={self.seed}", *(["train.target=null"] if self.mode == "single" else [])]
        return load(f"small/{self.model}/{self.mode}", overrides)

    @property
    def path(self) -> Path:
        """The file with its result."""
        return RESULTS / f"{self.model}-{self.mode}-{self.seed}.json"

    def is_done(self) -> bool:
        """Whether the result is stored, of the recipe as it is."""
        return kept_runs.kept(self.path, self.loaded.recipe) is not None


@dataclass(frozen=True)
class Outcome:
    """When a run reached the target of its recipe; None if it missed it."""

    epochs: float | None  # until the first evaluation that reaches the target
    clock_s: float | None  # virtual seconds until then, evaluations included
    training_s: float | None  # virtual seconds until then, without evaluations
    best: float  # the best value of the target's metric
    wall_s: float  # of the whole command, by the clock of the host that trained


def study() -> list[Run]:
    """Return every run of the study, `single` first."""
    found = [Run(model, "single", seed) for model in MODELS for seed in THREE]
    for model in MODELS:
        modes = [mode for mode in MODES[1:] if is_trained(model, mode)]
        found += [Run(model, mode, seed) for mode in modes for seed in seeds_of(model, mode)]
    return found


def is_trained(model: str, mode: str) -> bool:
    """Return whether a mode is trained on a model; otherwise its epochs are `single`'s."""
    takes_singles = mode == "model" or (mode == "gpipe" and model not in WITH_BATCH_NORM)
    return not takes_singles or (model, mode) in CHECKS


def seeds_of(model: str, mode: str) -> Sequence[int]:
    """Return the seeds that a mode is trained with on a model."""
    return THREE if mode == "single" or (model in OF_THREE_SEEDS and (model, mode) not in CHECKS) else (0,)


def train(run: Run) -> None:
    """Train a run and store the result."""
    started = time.perf_counter()
    result, _, facts = kept_runs.trained(run.loaded)
    keep(run, result, facts, time.perf_counter() - started)


def keep(run: Run, result: RunResult, facts: Mapping[str, str], wall_s: float) -> None:
    """Store a run's result, with the versions and device that trained it (`facts`)."""
    kept_runs.keep(run.path, run.loaded.recipe, wall_s=wall_s, environment=facts, result=asdict(result))


def train_missing(jobs: int, tell: Callable[[str], object]) -> None:
    """Train the runs that aren't stored yet, each in a process of its own, `jobs` at a time; `tell` prints progress."""
    todo = [run for run in study() if not run.is_done()]
    tell(f"{len(todo)} of {len(study())} runs to make, {jobs} at a time")

    def make(run: Run) -> None:
        started = time.perf_counter()
        command = [sys.executable, "-m", "reports.studies.small_zoo", "--one", run.model, run.mode, str(run.seed)]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        wall_s = time.perf_counter() - started
        if done.returncode:
            raise RuntimeError(f"{run}: {done.stderr.strip()[-2000:]}")
        kept = json.loads(run.path.read_text())
        run.path.write_text(json.dumps(kept | {"wall_s": wall_s}) + "\n")
        tell(f"{run.model} {run.mode} seed {run.seed}: {wall_s:.0f} s, {kept['result']['sentence']}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(make, todo))


def set_clocks() -> None:
    """Replace the times of all results by those of today's simulator; see `clocks`."""
    for run in study():
        if (now := clocks.played_again(run.loaded, result_of(run))) is not None:
            made = json.loads(run.path.read_text())
            keep(run, now, made["environment"] | clocks.of_today(), made["wall_s"])


def result_of(run: Run) -> RunResult:
    """Return a run's stored result."""
    return read(RunResult, json.loads(run.path.read_text())["result"])


@cache
def outcome_of(run: Run) -> Outcome:
    """Return when a stored run reached its recipe's target."""
    recipe = load(f"small/{run.model}/{run.mode}").recipe
    target, result = recipe.train.target, result_of(run)
    assert target is not None
    best = make_dataset(recipe.dataset).metrics[target.metric]
    values = [point.metrics[target.metric] for point in result.points]
    reaches = [value >= target.value if best == "max" else value <= target.value for value in values]
    wall_s = json.loads(run.path.read_text())["wall_s"]
    top = max(values) if best == "max" else min(values)
    if True not in reaches:
        return Outcome(None, None, None, top, wall_s)
    point = result.points[reaches.index(True)]
    evaluations = result.metrics["evaluation_time_s"] / len(values) * (reaches.index(True) + 1)
    return Outcome(point.samples / _epoch(run.model), point.clock_s, point.clock_s - evaluations, top, wall_s)


@cache
def _epoch(model: str) -> float:
    """Return the training samples of an epoch of a model's data set."""
    single = Run(model, "single", 0)
    return result_of(single).points[-1].samples / single.loaded.recipe.train.max_epochs


@cache
def simulated(model: str, mode: str) -> RunResult:
    """Return a simulated epoch of a recipe."""
    loaded = load(f"small/{model}/{mode}", ["engine.kind=simulated"])
    return simulate_epoch(prepare(loaded.recipe, loaded.cluster))[0]


def target_rows() -> Iterator[list[object]]:
    """Yield a row per model: its target and the values of `single` that it derives from."""
    for model in MODELS:
        recipe = load(f"small/{model}/single").recipe
        target = recipe.train.target
        assert target is not None
        reached = [value_at(result_of(Run(model, "single", seed)), target.metric, 2 / 3) for seed in THREE]
        yield [
            model,
            recipe.dataset["name"],
            target.metric,
            f"{recipe.train.max_epochs}",
            ", ".join(f"{value:.4g}" for value in reached),
            f"{statistics.median(reached):.4g}",
            f"**{target.value:g}**",
            baseline(recipe.dataset),
        ]


def value_at(result: RunResult, metric: str, fraction: float) -> float:
    """Return a metric at the last evaluation within the first `fraction` of a run."""
    limit = fraction * result.points[-1].samples * (1 + 1e-9)
    return [point.metrics[metric] for point in result.points if point.samples <= limit][-1]


def baseline(options: Any) -> str:
    """Return a baseline without a neural network, as text, for data sets that have one."""
    dataset = make_dataset(options)
    if isinstance(dataset, Translation):
        return f"copying the source: {copy_baseline(dataset):.3g}"
    if isinstance(dataset, Captions):
        return f"commonest caption: {dataset.majority_baseline():.3g}"
    if isinstance(dataset, Text):
        trigram = Trigram(dataset.text("train"), options["vocabulary"])
        return f"smoothed trigram: {trigram.perplexity(dataset.text('eval')):.4g}"
    return ""


def mode_rows() -> Iterator[list[object]]:
    """Yield a row per model and mode, trained or derived."""
    for model in MODELS:
        for mode in MODES:
            yield trained_row(model, mode) if is_trained(model, mode) else derived_row(model, mode)


def trained_row(model: str, mode: str) -> list[object]:
    """Return the row of a mode that was trained."""
    runs = [Run(model, mode, seed) for seed in seeds_of(model, mode)]
    outcomes, result = [outcome_of(run) for run in runs], result_of(runs[0])
    reached = [outcome for outcome in outcomes if outcome.epochs is not None]
    best = ", ".join(f"{outcome.best:.4g}" for outcome in outcomes)
    return [
        model,
        mode,
        result.plan,
        f"{len(reached)} of {len(runs)}" + ("" if len(reached) == len(runs) else f" (best {best})"),
        in_range([outcome.epochs for outcome in outcomes], "{:g}".format),
        in_range([outcome.clock_s for outcome in outcomes], seconds),
        in_range([outcome.training_s for outcome in outcomes], seconds),
        num_bytes(result.metrics["comm_bytes_per_sample"]),
        f"{statistics.median(outcome.wall_s for outcome in outcomes):.0f} s",
    ]


def derived_row(model: str, mode: str) -> list[object]:
    """Return the row of a mode that isn't trained: the epochs of `single`, and simulated times."""
    epochs = [outcome_of(Run(model, "single", seed)).epochs for seed in THREE]
    result = simulated(model, mode)
    return [
        model,
        mode,
        result.plan,
        "*single's*",
        in_range(epochs, "{:g}".format),
        "",
        in_range([value and value * result.metrics["epoch_time_s"] for value in epochs], seconds),
        num_bytes(result.metrics["comm_bytes_per_sample"]),
        "",
    ]


def summary() -> str:
    """Return the table of `docs/results.md`: time to accuracy and epochs of the modes whose updates differ."""
    modes = ("single", "dp", "pipedream", "pipedream-replicated")
    return table(
        ["model, target", *modes], ([_title(model), *(_short(model, mode) for mode in modes)] for model in MODELS)
    )


def _title(model: str) -> str:
    target = load(f"small/{model}/single").recipe.train.target
    assert target is not None
    return f"{model}, {target.metric} {target.value:g}"


def _short(model: str, mode: str) -> str:
    outcomes = [outcome_of(Run(model, mode, seed)) for seed in seeds_of(model, mode)]
    reached = [outcome for outcome in outcomes if outcome.epochs is not None]
    clock_s, epochs = middle([each.clock_s for each in outcomes]), middle([each.epochs for each in outcomes])
    if clock_s is None or epochs is None:
        return f"missed ({', '.join(f'{outcome.best:.4g}' for outcome in outcomes)})"
    text = f"{seconds(clock_s)}, {epochs:g} epochs"
    return text if len(reached) == len(outcomes) else f"{text} ({len(reached)} of {len(outcomes)} seeds)"


def page() -> str:
    """Return the report."""
    facts = json.loads(Run("vgg16", "single", 0).path.read_text())["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in facts.items() if name in ("torch", "python", "pipebench"))
    walls = [json.loads(run.path.read_text())["wall_s"] for run in study()]
    total = f"{len(walls)} runs, {sum(walls) / 60:.0f} minutes of single threads, the longest {max(walls):.0f} s"
    targets = ["model", "data", "metric", "epochs", "at two thirds", "median", "target", "without learning"]
    modes = ["model", "mode", "plan", "reached", "epochs", "time to accuracy", "without evaluation", "sent per sample"]
    return "\n".join(
        [
            HEAD,
            table(targets, target_rows()),
            "\n## Modes\n",
            table([*modes, "wall"], mode_rows()),
            NOTES,
            f"{total}; {versions}.",
        ]
    )


def main() -> None:
    """Train what is missing and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "MODE", "SEED"), help="train this run, and print no page")
    given = parser.parse_args()
    if given.one:
        model, mode, seed = given.one
        train(Run(model, mode, int(seed)))
        return
    train_missing(given.jobs, lambda line: print(line, file=sys.stderr, flush=True))
    set_clocks()
    print(page())


if __name__ == "__main__":
    main()
