"""Runs side by side: a row per recipe, with the speed-up over data parallelism, for the console and MLflow.

A comparison varies one thing: rows share a group, and a dp baseline, only if their recipes agree in all but the
parallelism. Runs of one recipe under several seeds are one row, with median and range. The runs of a sweep share a
group whatever it varies; a sweep over workers adds columns of scaling.
"""

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipebench.formats import UNKNOWN, num_bytes, number, percent, ratio, seconds
from pipebench.train.result import COMPLETED, REACHED, RunResult

BASELINE_MODE = "dp"
REACHED_HEADING = "reached"
_NAMES = ("run", "plan")
_HEADINGS = (
    *("time to accuracy", "vs dp", "epochs", "epoch time", "vs dp"),
    *("sent per sample", "peak memory", "bubble"),
)
# What two recipes of a comparison may differ in: the way of parallelising, what it asks of the learning rate (samples
# per update differ), where the model may be cut, and what changes neither the training nor its clock.
_FREE = (
    "name",
    "tracking",
    "parallelism",
    "train.seed",  # runs with the same seeds are compared
    "train.optimizer.lr",
    "train.optimizer.lr_scaling",
    "train.schedule.warmup_epochs",
    "model.leaves",
    "engine.max_restarts",
    "engine.stall_limit_s",
    "engine.silence_limit_s",
    "engine.join_limit_s",
)
# Schedules whose rate depends on when training would end; for the others the number of epochs is only patience.
_ENDING_SCHEDULES = ("cosine", "polynomial")
_Format = Callable[[float], str]
_SCALING_HEADINGS = ("workers", "speed-up", "efficiency")


@dataclass(frozen=True)
class ComparedRun:
    """One row: the runs of one recipe, which differ in their seed only.

    Attributes:
        name: the recipe's; in a sweep with the varied values.
        runs: at least one.
    """

    name: str
    runs: tuple[RunResult, ...]

    @property
    def recipe_name(self) -> str:
        """The recipe's name, the same for all rows of a sweep."""
        return self.runs[0].recipe.get("name", self.name)

    @property
    def varied(self) -> Mapping[str, str]:
        """The row's values of the keys that its sweep varies; empty without one."""
        return self.runs[0].varied

    @property
    def num_workers(self) -> float | None:
        """Workers of the row's runs, None if not recorded."""
        return _median(_values(self.runs, "num_workers"))

    @property
    def setting(self) -> Mapping[str, str]:
        """The recipe's keys that rows must share to be compared."""
        recipe = self.runs[0].recipe
        ends = recipe.get("train.schedule.name") in _ENDING_SCHEDULES
        free = _FREE if ends else (*_FREE, "train.max_epochs")
        return {k: value for k, value in recipe.items() if not any(f"{k}.".startswith(f"{each}.") for each in free)}

    @property
    def reached(self) -> tuple[RunResult, ...]:
        """The runs that reached their target: only they have a time to accuracy."""
        return tuple(run for run in self.runs if run.outcome == REACHED)

    def has_succeeded(self) -> bool:
        """Return whether every run completed or reached its target."""
        return all(run.outcome in (REACHED, COMPLETED) for run in self.runs)


@dataclass(frozen=True)
class RunGroup:
    """Rows that may be compared with each other.

    Attributes:
        title: the keys in which the group differs from others; empty for a single group.
    """

    title: str
    entries: tuple[ComparedRun, ...]


def groups(results: Sequence[RunResult]) -> list[RunGroup]:
    """Return a row per recipe, in groups of comparable rows, in the order of their first runs."""
    runs: dict[str, list[RunResult]] = {}
    for result in results:
        runs.setdefault(result.name, []).append(result)
    found: dict[frozenset[tuple[str, str]], list[ComparedRun]] = {}
    for name, each in runs.items():
        entry = ComparedRun(name, tuple(each))
        found.setdefault(frozenset(_shared(entry).items()), []).append(entry)
    titles = _titles([_shared(entries[0]) for entries in found.values()])
    return [RunGroup(title, tuple(entries)) for title, entries in zip(titles, found.values(), strict=True)]


def headings(results: Sequence[RunResult]) -> tuple[str, ...]:
    """Return the headings of `rows`.

    Several seeds add a column of how many reached the target; a sweep over the number of workers adds that number, the
    speed-up of epochs over the first number, and the efficiency per worker.
    """
    counted = (REACHED_HEADING,) if _has_seeds(results) else ()
    scaling = _SCALING_HEADINGS if _scales(results) else ()
    return (*_NAMES, *counted, *_HEADINGS, *scaling)


def rows(results: Sequence[RunResult], group: RunGroup) -> list[tuple[str, ...]]:
    """Return one row of texts per recipe of a group of `results`, under `headings`.

    A run that missed or diverged shows that instead of a time. Several seeds show the median and, where they differ,
    the range: of times and epochs to the target over the seeds that reached it.
    """
    names = short_names([each.name for part in groups(results) for each in part.entries])
    counted = _has_seeds(results)
    scales = _scales(results)
    return [
        (
            *_row(names[entry.name], entry, baseline(entry, group.entries), counted),
            *(_scaling(entry, group.entries) if scales else ()),
        )
        for entry in group.entries
    ]


def comparison_markdown(results: Sequence[RunResult]) -> str:
    """Return a Markdown table per group, followed by a sentence on the outcome of every run."""
    parts = []
    for group in groups(results):
        table = markdown_table(headings(results), rows(results, group))
        parts.append(f"**{group.title}**\n\n{table}" if group.title else table)
    seeded = _has_seeds(results)
    sentences = (f"- {run.name}{f', seed {run.seed}' if seeded else ''}: {run.sentence}" for run in results)
    return "\n\n".join([*parts, "\n".join([*sentences, *(f"- {note}" for note in notes(results))])]) + "\n"


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without a newline at the end."""
    every = (head, ["---"] * len(head), *lines)
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in every)


def notes(results: Sequence[RunResult]) -> list[str]:
    """Return the runs' notes, a line each, with the names of all runs that have it."""
    short = short_names([each.name for part in groups(results) for each in part.entries])
    names: dict[str, list[str]] = {}
    for entry in (entry for group in groups(results) for entry in group.entries):
        for fact, note in (item for run in entry.runs for item in run.notes.items()):
            names.setdefault(f"{fact}: {note}", []).append(short[entry.name])
    return [f"{', '.join(dict.fromkeys(who))}: {note}" for note, who in names.items()]


def baseline(entry: ComparedRun, others: Iterable[ComparedRun]) -> ComparedRun | None:
    """Return a row's dp baseline: of its setting and with the same seeds; None without one."""
    seeds = {run.seed for run in entry.runs}
    fitting = (other for other in others if other.runs[0].mode == BASELINE_MODE and other.setting == entry.setting)
    return next((other for other in fitting if {run.seed for run in other.runs} == seeds), None)


def time_to_accuracy_s(result: RunResult) -> float | None:
    """Return the time to accuracy of a run that reached its target, else None."""
    return result.metrics.get("time_to_accuracy_s") if result.outcome == REACHED else None


def speed_up(entry: ComparedRun, base: ComparedRun | None) -> float | None:
    """Return a row's speed-up to the target over the baseline, by medians; None unless all runs reached it."""
    if base is None or any(len(each.reached) < len(each.runs) for each in (entry, base)):
        return None
    return _divided(*(_median(_values(each.runs, "time_to_accuracy_s")) for each in (base, entry)))


def epoch_speed_up(entry: ComparedRun, base: ComparedRun | None) -> float | None:
    """Return a row's speed-up of epochs over the baseline, by medians."""
    if base is None:
        return None
    return _divided(*(_median(_values(each.runs, "epoch_time_s")) for each in (base, entry)))


def speed_ups(results: Sequence[RunResult]) -> dict[tuple[str, int | None], dict[str, float]]:
    """Return the speed-ups over data parallelism, by run and by row, under their tracked names.

    Returns:
        By name and seed: `speedup_over_dp`, to the target, and `epoch_speedup_over_dp`, of epochs, over the dp run of
        the same group and seed; unknown ones are left out. With None for the seed the row's, by medians.
    """
    found: dict[tuple[str, int | None], dict[str, float]] = {}
    for group in groups(results):
        for entry in group.entries:
            base = baseline(entry, group.entries)
            found[entry.name, None] = _speed_ups(entry, base)
            for run in entry.runs:
                same_seed = [other for other in base.runs if other.seed == run.seed] if base is not None else []
                against = ComparedRun(base.name, tuple(same_seed[:1])) if base is not None and same_seed else None
                found[entry.name, run.seed] = _speed_ups(ComparedRun(entry.name, (run,)), against)
    return found


def _speed_ups(entry: ComparedRun, base: ComparedRun | None) -> dict[str, float]:
    values = {"speedup_over_dp": speed_up(entry, base), "epoch_speedup_over_dp": epoch_speed_up(entry, base)}
    return {name: value for name, value in values.items() if value is not None}


def smallest(entry: ComparedRun, others: Iterable[ComparedRun]) -> ComparedRun:
    """Return the baseline of a row's scaling: of its sweep, with the first row's number of workers.

    Of several it is the one that agrees with the row in most varied values.
    """
    own = [other for other in others if other.recipe_name == entry.recipe_name]
    fitting = [other for other in own if other.num_workers == own[0].num_workers]
    return max(fitting, key=lambda other: sum(entry.varied.get(key) == value for key, value in other.varied.items()))


def scaling(entry: ComparedRun, others: Iterable[ComparedRun]) -> tuple[float | None, float | None]:
    """Return a row's speed-up of epochs over `smallest`, and that over the ratio of workers."""
    first = smallest(entry, others)
    faster, wider = epoch_speed_up(entry, first), _divided(entry.num_workers, first.num_workers)
    return faster, _divided(faster, wider)


def _scaling(entry: ComparedRun, others: Iterable[ComparedRun]) -> tuple[str, ...]:
    faster, each = scaling(entry, others)
    workers = UNKNOWN if entry.num_workers is None else _count(entry.num_workers)
    return workers, ratio(faster), percent(each)


def _scales(results: Sequence[RunResult]) -> bool:
    """Return whether a sweep varies the number of workers."""
    numbers: dict[str, set[float]] = {}
    for result in results:
        if result.varied and "num_workers" in result.metrics:
            numbers.setdefault(result.recipe.get("name", result.name), set()).add(result.metrics["num_workers"])
    return any(len(each) > 1 for each in numbers.values())


def _shared(entry: ComparedRun) -> dict[str, str]:
    """Return a row's setting without the keys that its sweep varies."""
    return {key: value for key, value in entry.setting.items() if key not in entry.varied}


def _row(name: str, entry: ComparedRun, base: ComparedRun | None, counted: bool) -> tuple[str, ...]:
    first = entry.runs[0]
    outcomes = list(dict.fromkeys(run.outcome for run in entry.runs))
    no_time = UNKNOWN if entry.has_succeeded() else ", ".join(outcomes)
    times = _values(entry.reached, "time_to_accuracy_s")
    targeted = sum(run.outcome != COMPLETED for run in entry.runs)
    share = f"{len(entry.reached)} of {targeted}" if targeted else UNKNOWN
    return (
        name,
        first.plan,
        *((share,) if counted else ()),
        _spread(times, seconds) if times else no_time,
        ratio(speed_up(entry, base)),
        _spread(_values(entry.reached, "epochs_to_target"), _count),
        _spread(_values(entry.runs, "epoch_time_s"), seconds),
        ratio(epoch_speed_up(entry, base)),
        _spread(_values(entry.runs, "comm_bytes_per_sample"), num_bytes),
        _spread(_values(entry.runs, "peak_memory_bytes_max"), num_bytes),
        _spread(_values(entry.runs, "bubble_fraction"), percent),
    )


def _spread(values: Sequence[float], text: _Format) -> str:
    """Return the median and, if it differs, the range."""
    if not values:
        return UNKNOWN
    middle, low, high = (text(each(values)) for each in (statistics.median, min, max))
    return middle if low == high else f"{middle} [{low} to {high}]"


def _count(value: float) -> str:
    return f"{value:g}" if value == int(value) else number(value)


def _values(runs: Iterable[RunResult], metric: str) -> list[float]:
    return [run.metrics[metric] for run in runs if metric in run.metrics]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _has_seeds(results: Sequence[RunResult]) -> bool:
    return len({result.name for result in results}) < len(results)


def _titles(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys and values in which each setting differs from the others, as on the command line."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    differing = [key for key in keys if len({setting.get(key) for setting in settings}) > 1]
    return [" ".join(f"{key}={setting[key]}" for key in differing if key in setting) for setting in settings]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Drop the names' common beginning, up to a dash.

    A sweep's varied values come last and begin with a key: a dash there is part of a value.
    """
    common = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 # names, not paths
    common = common.partition("=")[0]
    return {name: name[common.rfind("-") + 1 :] for name in names}


def _divided(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None
