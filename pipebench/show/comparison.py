"""Runs side by side: a row per recipe, with the speed-up over data parallelism, as the console and MLflow show them.

A comparison varies one thing: rows are set beside each other, and beside a dp row, only where all of their recipes but
the way of parallelising is the same. Runs of one recipe under several seeds are one row, with median and range. The
runs of a sweep stand together whatever it varies; where that is the number of workers, how the recipe scales is said.
"""

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipebench.formats import UNKNOWN, num_bytes, number, percent, ratio, seconds
from pipebench.train.result import COMPLETED, REACHED, RunResult

BASELINE_MODE = "dp"
REACHED_HEADING = "reached"
_HEADINGS = (
    "run",
    "plan",
    "time to accuracy",
    "vs dp",
    "epochs",
    "epoch time",
    "vs dp",
    "sent per sample",
    "peak memory",
    "bubble",
)
# What two recipes of a comparison may differ in: the way of parallelising, what it asks of the learning rate (samples
# per update differ), where the model may be cut, and what changes neither the training nor its clock.
_FREE = (
    "name",
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
        name: the recipe's, in a sweep with what varies.
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
        """What the row has of what its sweep varies; empty without one."""
        return self.runs[0].varied

    @property
    def num_workers(self) -> float | None:
        """Workers of the row's runs, None where nobody recorded them."""
        return _median(_values(self.runs, "num_workers"))

    @property
    def setting(self) -> Mapping[str, str]:
        """What all rows that are compared with this one have in common."""
        return _setting(self.runs[0].recipe)

    @property
    def reached(self) -> tuple[RunResult, ...]:
        """The runs that reached their target: only they have a time to accuracy."""
        return tuple(run for run in self.runs if run.outcome == REACHED)

    def has_no_trouble(self) -> bool:
        """Return whether every run did what it was asked."""
        return all(run.outcome in (REACHED, COMPLETED) for run in self.runs)


@dataclass(frozen=True)
class RunGroup:
    """Rows that may be compared with each other.

    Attributes:
        title: in what the group differs from others; empty where there are none.
        entries: the rows.
    """

    title: str
    entries: tuple[ComparedRun, ...]


def groups(results: Sequence[RunResult]) -> list[RunGroup]:
    """Return a row per recipe, those that may be compared together; each in the order of its first run."""
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

    Several seeds bring a column that says how many of them reached the target; a sweep over the number of workers
    brings how many there are, how much faster epochs are than with the first number, and that per worker.
    """
    counted = (REACHED_HEADING,) if _has_seeds(results) else ()
    scaling = _SCALING_HEADINGS if _scales(results) else ()
    return (*_HEADINGS[:2], *counted, *_HEADINGS[2:], *scaling)


def rows(results: Sequence[RunResult], group: RunGroup) -> list[tuple[str, ...]]:
    """Return one row of texts per recipe of a group, under `headings`.

    A run that missed or diverged says so instead of a time. Of several seeds there are the median and, where they
    differ, the range: of times and epochs to the target over the seeds that reached it.

    Args:
        results: of the whole comparison.
        group: one of its groups.
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
    """Return the comparison as a Markdown table per group, followed by what became of every run in a sentence each."""
    parts = []
    for group in groups(results):
        head = headings(results)
        lines = [head, tuple("---" for _ in head), *rows(results, group)]
        table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        parts.append(f"**{group.title}**\n\n{table}" if group.title else table)
    seeded = _has_seeds(results)
    sentences = (f"- {run.name}{f', seed {run.seed}' if seeded else ''}: {run.sentence}" for run in results)
    told = [*sentences, *(f"- {note}" for note in notes(results))]
    return "\n\n".join([*parts, "\n".join(told)]) + "\n"


def notes(results: Sequence[RunResult]) -> list[str]:
    """Return what to know of some runs' numbers: a line per note, with the names of all runs that have it."""
    short = short_names([each.name for part in groups(results) for each in part.entries])
    names: dict[str, list[str]] = {}
    for entry in (entry for group in groups(results) for entry in group.entries):
        for fact, note in (item for run in entry.runs for item in run.notes.items()):
            names.setdefault(f"{fact}: {note}", []).append(short[entry.name])
    return [f"{', '.join(dict.fromkeys(who))}: {note}" for note, who in names.items()]


def baseline(entry: ComparedRun, others: Iterable[ComparedRun]) -> ComparedRun | None:
    """Return the dp row that a row is measured against: of its own group and with the same seeds; None without one."""
    seeds = {run.seed for run in entry.runs}
    fitting = (other for other in others if other.runs[0].mode == BASELINE_MODE and other.setting == entry.setting)
    return next((other for other in fitting if {run.seed for run in other.runs} == seeds), None)


def time_to_accuracy_s(result: RunResult) -> float | None:
    """Return the time to accuracy of a run that has one: only a run that reached its target."""
    return result.metrics.get("time_to_accuracy_s") if result.outcome == REACHED else None


def speed_up(entry: ComparedRun, base: ComparedRun | None) -> float | None:
    """Return how many times sooner than the baseline a row reached the target, by medians; None if any run didn't."""
    if base is None or any(len(each.reached) < len(each.runs) for each in (entry, base)):
        return None
    return _divided(*(_median(_values(each.runs, "time_to_accuracy_s")) for each in (base, entry)))


def epoch_speed_up(entry: ComparedRun, base: ComparedRun | None) -> float | None:
    """Return how many times faster than the baseline's a row's epochs are, by medians."""
    if base is None:
        return None
    return _divided(*(_median(_values(each.runs, "epoch_time_s")) for each in (base, entry)))


def speed_ups(results: Sequence[RunResult]) -> dict[tuple[str, int | None], dict[str, float]]:
    """Return how much faster than data parallelism runs are, under the names that they are tracked by.

    Returns:
        By name and seed: `speedup_over_dp`, how many times sooner the target was reached than in the dp run of the same
        group and seed, and `epoch_speedup_over_dp`, likewise of epochs; what isn't known is left out. With None for the
        seed it is that of the row, by medians.
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
    """Return the row that a row's scaling is measured against: of its sweep, with the first row's number of workers.

    Of several with so many workers it is the one that agrees with the row in most of what varies.
    """
    own = [other for other in others if other.recipe_name == entry.recipe_name]
    fitting = [other for other in own if other.num_workers == own[0].num_workers]
    return max(fitting, key=lambda other: sum(entry.varied.get(key) == value for key, value in other.varied.items()))


def scaling(entry: ComparedRun, others: Iterable[ComparedRun]) -> tuple[float | None, float | None]:
    """Return how many times faster a row's epochs are than those of `smallest`, and that over the ratio of workers."""
    first = smallest(entry, others)
    faster, wider = epoch_speed_up(entry, first), _divided(entry.num_workers, first.num_workers)
    return faster, _divided(faster, wider)


def _scaling(entry: ComparedRun, others: Iterable[ComparedRun]) -> tuple[str, ...]:
    faster, each = scaling(entry, others)
    workers = UNKNOWN if entry.num_workers is None else _count(entry.num_workers)
    return workers, ratio(faster), UNKNOWN if each is None else percent(each)


def _scales(results: Sequence[RunResult]) -> bool:
    """Return whether a sweep varies the number of workers."""
    numbers: dict[str, set[float]] = {}
    for result in results:
        if result.varied and "num_workers" in result.metrics:
            numbers.setdefault(result.recipe.get("name", result.name), set()).add(result.metrics["num_workers"])
    return any(len(each) > 1 for each in numbers.values())


def _shared(entry: ComparedRun) -> dict[str, str]:
    """Return what all rows of a group have in common: their setting but what a sweep varies."""
    return {key: value for key, value in entry.setting.items() if key not in entry.varied}


def _row(name: str, entry: ComparedRun, base: ComparedRun | None, counted: bool) -> tuple[str, ...]:
    first = entry.runs[0]
    outcomes = list(dict.fromkeys(run.outcome for run in entry.runs))
    no_time = UNKNOWN if entry.has_no_trouble() else ", ".join(outcomes)
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
    """Return the median and, where it says more, the range."""
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


def _setting(recipe: Mapping[str, str]) -> dict[str, str]:
    ends = recipe.get("train.schedule.name") in _ENDING_SCHEDULES
    free = _FREE if ends else (*_FREE, "train.max_epochs")
    return {key: value for key, value in recipe.items() if not any(f"{key}.".startswith(f"{each}.") for each in free)}


def _titles(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return in what each setting differs from the others, as one would say it on the command line."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    differing = [key for key in keys if len({setting.get(key) for setting in settings}) > 1]
    return [" ".join(f"{key}={setting[key]}" for key in differing if key in setting) for setting in settings]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Drop what all names begin with, up to a dash: in a comparison only the rest tells runs apart.

    What a sweep varies stands last and begins with a key: there a dash is part of a value.
    """
    common = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 # names, not paths
    common = common.partition("=")[0]
    return {name: name[common.rfind("-") + 1 :] for name in names}


def _divided(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None
