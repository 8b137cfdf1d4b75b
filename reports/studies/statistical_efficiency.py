"""Epochs to a target under every weight policy, and with large minibatches: `nox -s efficiency`, or this as a program.

Every run leaves a small file in `statistical_efficiency_runs/` beside this one; a run whose file is there, made by the
same recipe, is not made again, so that a session that was cut short goes on where it ended, and the page and its
pictures are made without training. What is printed is `statistical_efficiency.md`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipebench import files
from pipebench.formats import UNKNOWN, number, ratio, seconds
from pipebench.model.device import environment, torch_settings
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.show.progress import Silent
from pipebench.train.engines import on_virtual_clock
from pipebench.train.loop import TrainingLoop
from pipebench.train.prepare import prepare
from pipebench.train.result import RunResult
from reports.studies.efficiency_pictures import draw
from reports.studies.planned_models import table
from reports.studies.recipe_key import recipe_key

RESULTS = Path(__file__).parent / "statistical_efficiency_runs"
SEEDS = (0, 1, 2)
METRICS = {"vgg16": "top1", "gnmt8": "bleu"}
# Recipes of recipes/steep/, in the order of the page.
MODES = (
    "single", "dp", "pipedream", "vertical-sync", "no-stashing", "pipedream-2bw", "dp-asp", "spectrain", "xpipe",
    "pipemare",
)  # fmt: skip
# With so few updates per epoch as 16 times the samples leave, gnmt8 would hardly begin.
LARGE = {"vgg16": ("dp-large", "dp-large-lars"), "gnmt8": ()}
# Rates that are tried on the one worker that a model's rate is chosen with, seed 0.
GRIDS: dict[tuple[str, str], tuple[float, ...]] = {
    ("vgg16", "single"): (0.005, 0.01, 0.02, 0.04),
    ("vgg16", "single-lars"): (0.125, 0.5, 2.0, 8.0),
    ("gnmt8", "single"): (0.002, 0.004, 0.008, 0.016),
}

HEAD = """# Statistical efficiency

How many epochs does it take to a target when gradients are late, wrong, predicted, corrected, or of larger
minibatches? `nox -s efficiency` makes this page and its pictures from `reports/studies/statistical_efficiency_runs/`,
after training what isn't there yet: real training with exact weight versions on the virtual engine; the clock is that
of four V100s of Cluster-A, computed. The recipes are those of `recipes/steep/`, which differ in the way of
parallelising only (and, for LARS, in the optimizer).

Both tasks are made so that the target lies on the steep part of the curve, which is evaluated every half epoch.
**vgg16**: the narrow VGG-16 with BatchNorm on 2,000 real digits. **gnmt8**: all eight layers, 64 wide, on 3,000 number
words of five digits (English to German); the target is a BLEU on characters that training passes on its way to 100.
Minibatches of 32; straight plans of four stages; three seeds.

## Rates

No mode has a rate of its own. The rate is the one of four with which *one worker* needs the fewest epochs (seed 0);
updates of n minibatches take n times that with SGD (`lr_scaling: linear`, Goyal et al. 2017) and root n times that
with Adam (`sqrt`): `dp`, `pipedream-2bw` and large minibatches alike. LARS's is on another scale and was chosen by the
same rule. One epoch of warm-up everywhere, and constant from then on.
"""
SAID = """
## What the papers say

| way | said | where |
| --- | --- | --- |
| weight stashing | about as many epochs as BSP | PipeDream (SOSP'19), section 5.2 and figure 11 |
| vertical sync | hardly any effect, so it is off by default | PipeDream, 2018 preprint |
| no stashing | no gradient of the loss for any weights, which can prevent convergence; doesn't reach the accuracy \
of data parallelism | SOSP'19, section 3.3; 2018 preprint |
| ASP | fewer stalls, more epochs; VGG-16 on four servers of Cluster-B took 7.4 times PipeDream's time to 48% | 2018 \
preprint; SOSP'19, section 5.2 |
| large minibatches, LARS | VGG-16 on 8 GPUs of Cluster-C: 1,024 is the fastest, 4,096 and 8,192 miss the target; \
PipeDream is more than 2.4 times as fast to it | SOSP'19, section 5.2 and figure 13 |
| 2BW | similar final accuracy | Narayanan et al. (ICML'21), abstract |
| SpecTrain | staleness costs stability and accuracy; with prediction accuracy is comparable | Chen et al. (2018), \
abstract |
| XPipe | accuracy very comparable to the synchronous counterpart's, or slightly better | Guan et al. (2019), abstract |
| PipeMare | similar model quality to synchronous pipelines | Yang et al. (MLSys'21), abstract |

The papers' models are larger, and trained for long to a final accuracy; here is a short way to a target.
"""
NOTES = """## What it says

- **Stashing is as good as BSP here**, as the papers say: fewer epochs than `dp` on vgg16 and about as many on gnmt8.
  Both take more than one worker does, on gnmt8 twice as many: that is what late gradients, and four times the samples
  per update, cost at one worker's best rate.
- **Vertical sync is far from negligible here**: over twice one worker's epochs on vgg16, and no target within eight
  epochs on gnmt8. With it every stage is three updates late, without it only the first is. A smaller rate would leave
  late gradients more room; nothing here contradicts an effect that is small there.
- **Not stashing costs little here**: some 40% more epochs than stashing on vgg16, none on gnmt8. A backward that
  meets weights up to three updates newer is wrong, but so few updates change little. The papers' warning is about
  where training ends, which these runs don't see.
- **2BW misses both targets**: its rate is scaled like `dp`'s, which reaches them at as many samples per update, but its
  gradients are one such update late, and that is more than the scaled rate bears.
- **ASP needs nearly twice `dp`'s epochs on vgg16 and misses on gnmt8**, which agrees with "fewer stalls, more
  epochs"; it is about as late as vertical sync, and about as good.
- **Predicting weights works**: SpecTrain and XPipe need the fewest epochs of all modes with four workers, on both
  models, on vgg16 no more than one worker does; one seed of SpecTrain took twice as long on gnmt8. XPipe's four
  microbatches cost virtual time, since so narrow a network spends its time on launching kernels, and let BatchNorm see
  eight samples.
- **PipeMare** stashes nothing and is close to stashing: better on gnmt8, a little worse on vgg16.
- **Large minibatches** (vgg16, 512 samples: four updates per epoch) miss the target within 16 epochs, with LARS as
  without: the rates that the rules give are too large or the updates too few. LARS gets further, to 0.88 at best and
  0.53 without, medians of three seeds.

## How to read it

Two tasks, four stages, few seeds, half an epoch between evaluations: differences below an epoch mean little, and
BatchNorm lets accuracy jump from one evaluation to the next. The rate is one worker's best, by one seed, which is hard
on whatever is late: the page says how much room a method leaves, not how good it could be made. Time is virtual, of
V100s that are hardly busy with such narrow networks. Every evaluation drains the pipeline, after which recurrences
start over; that spares late gradients a little. Epochs are medians of the seeds that reached the target, with their
range; a mode of which a seed missed has no ratio. *best* is the median of the seeds' best values.

Some of the set-up was chosen with results in view, of one worker or of some modes: vgg16's target and the half epochs
between evaluations after two of the rates had been tried at a target of 0.90; a fourth rate in each grid, so that the
best one lies inside; and the epochs after which a run is given up, which were 20 and 12 at first and are 16 and 8. Runs
that were there by then are cut off at that; the two rates of LARS that missed lack their evaluation after epoch 16.
"""


@dataclass(frozen=True)
class Run:
    """One training run of the study.

    Attributes:
        model: `vgg16` or `gnmt8`.
        mode: a recipe of its folder in `recipes/steep/`.
        seed: everything random.
        lr: a rate in place of the recipe's, where rates are tried; else None.
    """

    model: str
    mode: str
    seed: int
    lr: float | None = None

    @property
    def loaded(self) -> LoadedRecipe:
        """Its recipe."""
        rate = [] if self.lr is None else [f"train.optimizer.lr={self.lr}"]
        return load(f"steep/{self.model}/{self.mode}", [f"train.seed={self.seed}", *rate])

    @property
    def path(self) -> Path:
        """Where its outcome is kept."""
        rate = "" if self.lr is None else f"-lr{self.lr:g}"
        return RESULTS / f"{self.model}-{self.mode}-{self.seed}{rate}.json"

    @property
    def outcome(self) -> "Outcome | None":
        """What it came to; None if it isn't there, or was made by another recipe."""
        if not self.path.is_file():
            return None
        kept = json.loads(self.path.read_text())
        return Outcome(**kept["outcome"]) if kept["key"] == recipe_key(self.loaded.recipe) else None


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        outcome: `reached`, `missed` or `diverged`.
        epochs: to the target; None if it wasn't reached.
        clock_s: virtual seconds to the target, evaluations included; None likewise.
        samples_per_update: of the input stage.
        points: samples seen in epochs, virtual seconds and the metric, at every evaluation.
        cpu_s: of the whole run here.
    """

    outcome: str
    epochs: float | None
    clock_s: float | None
    samples_per_update: float
    points: list[list[float]]
    cpu_s: float


def study() -> Iterator[Run]:
    """Yield every run, those that rates are chosen by first, then seed by seed."""
    for (model, mode), rates in GRIDS.items():
        yield from (Run(model, mode, 0, lr) for lr in rates)
    for seed in SEEDS:
        for model in METRICS:
            yield from (Run(model, mode, seed) for mode in modes_of(model))


def modes_of(model: str) -> tuple[str, ...]:
    """Return the recipes of a model that the study trains."""
    return (*MODES, *LARGE[model])


def train(run: Run) -> Outcome:
    """Train, keep what came of it, and return that."""
    started_s = time.process_time()
    loaded = run.loaded
    with torch_settings(loaded.recipe.engine):
        job = prepare(loaded.recipe, loaded.cluster)
        result, _ = TrainingLoop(job, on_virtual_clock(job), Silent(), lambda point: None).run()
        facts = environment(job.setup.device)
    per_epoch = job.setup.sampler.num_samples
    outcome = outcome_of(result, METRICS[run.model], per_epoch, time.process_time() - started_s)
    kept = {
        "key": recipe_key(loaded.recipe),
        "environment": {name: facts[name] for name in ("torch", "python", "pipebench")},
        "outcome": asdict(outcome),
    }
    RESULTS.mkdir(exist_ok=True)
    files.replace(run.path, f"{json.dumps(kept)}\n".encode())
    return outcome


def outcome_of(result: RunResult, metric: str, per_epoch: int, cpu_s: float) -> Outcome:
    """Return what is kept of a run.

    Args:
        result: the run's.
        metric: the target's.
        per_epoch: training samples of an epoch.
        cpu_s: of the run here.
    """
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
        cpu_s,
    )


def train_missing(runs: Sequence[Run], tell: Callable[[str], Any]) -> None:
    """Make every run that isn't there yet, one after the other."""
    for run in runs:
        if run.outcome is None:
            made = train(run)
            tell(f"{run.path.stem}: {made.outcome}, {made.epochs} epochs, {made.cpu_s:.0f} s")


def chosen_rate(model: str, mode: str) -> float:
    """Return the rate that the rule chooses: fewest epochs to the target, the smaller of two that need as many."""
    tried = [(lr, Run(model, mode, 0, lr).outcome) for lr in GRIDS[model, mode]]
    reached = [(made.epochs, lr) for lr, made in tried if made is not None and made.epochs is not None]
    return min(reached)[1]


def rate_rows() -> list[list[str]]:
    """Return a row per rate tried."""
    return [
        [
            model,
            mode,
            f"{lr:g}" if lr != chosen_rate(model, mode) else f"**{lr:g}**",
            *_told([_made(model, mode, 0, lr)]),
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
        reached = f"{sum(each.epochs is not None for each in made)} of {len(made)}"
        best = statistics.median(max(value for _, _, value in each.points) for each in made)
        rows.append(
            [
                mode, number(made[0].samples_per_update), reached, *_told(made),
                ratio(_over(epochs, base["single"][0])), ratio(_over(epochs, base["dp"][0])),
                ratio(_over(clock_s, base["dp"][1])), number(best),
            ]
        )  # fmt: skip
    return rows


def _of(model: str, mode: str) -> list[Outcome]:
    """Return what the seeds that are there came to."""
    found = [made for made in (Run(model, mode, seed).outcome for seed in SEEDS) if made is not None]
    if not found:
        raise FileNotFoundError(f"nothing of {model} under {mode} is in {RESULTS}: train it first")
    return found


def _made(model: str, mode: str, seed: int, lr: float | None = None) -> Outcome:
    run = Run(model, mode, seed, lr)
    made = run.outcome
    if made is None:
        raise FileNotFoundError(f"{run.path} isn't there, or another recipe made it: train it first")
    return made


def _told(made: Sequence[Outcome]) -> list[str]:
    """Return epochs and virtual time to the target: the median of the seeds and, where they differ, the range."""
    epochs = sorted(each.epochs for each in made if each.epochs is not None)
    times_s = sorted(each.clock_s for each in made if each.clock_s is not None)
    if not epochs:
        return [", ".join(dict.fromkeys(each.outcome for each in made)), UNKNOWN]
    median_epochs, median_s = (statistics.median(values) for values in (epochs, times_s))
    if epochs[0] == epochs[-1]:
        return [number(median_epochs), seconds(median_s)]
    return [
        f"{number(median_epochs)} ({number(epochs[0])} to {number(epochs[-1])})",
        f"{seconds(median_s)} ({seconds(times_s[0])} to {seconds(times_s[-1])})",
    ]


def _medians(made: Sequence[Outcome]) -> tuple[float | None, float | None]:
    """Return median epochs and seconds; None unless every seed reached the target."""
    epochs = [each.epochs for each in made if each.epochs is not None]
    times_s = [each.clock_s for each in made if each.clock_s is not None]
    if len(epochs) < len(made):
        return None, None
    return statistics.median(epochs), statistics.median(times_s)


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def pictures(folder: Path) -> list[Path]:
    """Draw the curves of every model, against epochs and against virtual time; return where."""
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
    heads = ["mode", "samples per update", "reached", "epochs", "virtual time to target"]
    heads += ["epochs / single's", "epochs / dp's", "time / dp's", "best"]
    rates = ["model", "recipe", "rate", "epochs", "virtual time to target"]
    parts = [HEAD, table(rates, rate_rows()), SAID]
    for model, metric in METRICS.items():
        target = Run(model, "single", 0).loaded.recipe.train.target
        assert target is not None
        parts += [f"\n## {model}: {metric} {target.value:g}\n", table(heads, mode_rows(model)), ""]
        for axis in ("epochs", "time"):
            parts += [f"![{metric} of {model} against {axis}](statistical_efficiency_{model}_{axis}.png)\n"]
    made = [run.outcome for run in study()]
    cpu_s = [each.cpu_s for each in made if each is not None]
    missing = len(made) - len(cpu_s)
    lacking = f" Of {len(made)} runs {missing} are not there yet: *reached* says of how many seeds." if missing else ""
    by = f"trained by {'; '.join(trained_by())}: a later release may need other epochs with the same seed"
    return "\n".join([*parts, NOTES, f"{len(cpu_s)} runs, {sum(cpu_s) / 60:.0f} minutes of one core, {by}.{lacking}"])


def trained_by() -> list[str]:
    """Return the versions that runs were trained with, each once."""
    kept = (json.loads(run.path.read_text())["environment"] for run in study() if run.path.is_file())
    return sorted({", ".join(f"{name} {version}" for name, version in each.items()) for each in kept})


def main() -> None:
    """Train what is missing and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="train runs only whose name begins like this, and make no page")
    given = parser.parse_args()
    runs = [run for run in study() if run.path.stem.startswith(given.only)]
    train_missing(runs, lambda line: print(line, file=sys.stderr, flush=True))
    if not given.only:
        pictures(Path(__file__).parents[1])
        print(page())


if __name__ == "__main__":
    main()
