"""Runs side by side: a row per recipe, with the speed-up over data parallelism, for the console and MLflow.

A comparison varies one thing: rows share a group, and a dp baseline, only if their recipes agree in all keys but those
of the parallelism. The runs of a sweep share a group whichever key it varies, and a sweep over the number of devices
adds columns of scaling. Runs of one recipe under several seeds are one row, with median and range, in which a missed
target counts as an infinite time (`pipebench.train.seeds`). Rows are sorted by time to accuracy, or by throughput
without a target; those of a sweep over numbers keep its order.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipebench.formats import UNKNOWN, num_bytes, number, percent, ratio, seconds
from pipebench.schedule.modes import MODES
from pipebench.train.result import COMPLETED, MISSED, REACHED, RunResult
from pipebench.train.seeds import median, values_of
from pipebench.units import quantity

BASELINE_MODE = "dp"
REACHED_HEADING = "reached"
MARK = " *"  # after a number of samples per update that differs from the first row's
# Keys in which comparable recipes may differ: the parallelism, the learning rate (as samples per update differ), where
# the model may be cut, and keys that change neither the training nor its clock.
_FREE = (
    "name",
    "tracking",
    "parallelism",
    "train.seed",  # `baseline` compares equal seeds
    "train.optimizer.lr",
    "train.optimizer.lr_scaling",
    "train.schedule.warmup_epochs",
    "model.leaves",
    "engine.max_restarts",
    "engine.stall_limit_s",
    "engine.silence_limit_s",
    "engine.join_limit_s",
)
# Schedules whose rate depends on `train.max_epochs`; null is the name of a schedule of the user's own. For the others
# the number of epochs only limits how long a run tries to reach its target.
_ENDING_SCHEDULES = ("cosine", "polynomial", "null")
# Keys that determine the number of devices.
_COUNTING = ("cluster.name", "cluster.servers", "cluster.count", "parallelism.plan", "parallelism.tensor")
_Format = Callable[[float], str]


@dataclass(frozen=True)
class ComparedRun:
    """One row: the runs of one recipe, which differ in their seed only."""

    name: str  # the recipe's name, in a sweep with the varied values
    runs: tuple[RunResult, ...]  # at least one

    @property
    def recipe_name(self) -> str:
        """The recipe's name, the same for all rows of a sweep."""
        return self.runs[0].recipe.get("name", self.name)

    @property
    def varied(self) -> Mapping[str, str]:
        """The row's values of the keys that its sweep varies; empty without one."""
        return self.runs[0].varied

    @property
    def num_devices(self) -> float | None:
        """Number of devices; workers times slices for runs of older versions; None if not recorded."""
        devices, workers = self.median("num_devices"), self.median("num_workers")
        if devices is not None or workers is None:
            return devices
        return workers * int(self.runs[0].recipe.get("parallelism.tensor", 1))

    @property
    def setting(self) -> Mapping[str, str]:
        """The recipe's keys and values that comparable rows share."""
        recipe = self.runs[0].recipe
        ends = recipe.get("train.schedule.name") in _ENDING_SCHEDULES
        free = _FREE if ends else (*_FREE, "train.max_epochs")
        return {
            key: value
            for key, value in recipe.items()
            # Older runs lack later keys, which are null by default.
            if value != "null" and not any(f"{key}.".startswith(f"{each}.") for each in free)
        }

    def median(self, metric: str) -> float | None:
        """Return a metric's median over the runs; None if unknown, or if half or more missed their target."""
        return median(values_of(self.runs, metric))

    def has_succeeded(self) -> bool:
        """Return whether every run completed or reached its target."""
        return all(run.outcome in (REACHED, COMPLETED) for run in self.runs)


def _has_target(results: Iterable[RunResult]) -> bool:
    return any(result.has_target for result in results)


@dataclass(frozen=True)
class ComparisonRow:
    """The values of a row: medians over its runs, None if unknown."""

    name: str  # the recipe's, without the beginning that all names share
    mode: str  # its parallelism mode
    plan: str  # in the papers' notation
    is_dp: bool  # whether its mode allows several stages but its plan is data parallelism on all workers
    is_marked: bool  # whether its number of samples per update differs from the first row's
    outcome: str  # of its runs
    num_reached: int  # runs that reached their target
    num_targeted: int  # runs that have a target
    samples_per_update: float | None
    throughput_samples_per_s: float | None
    time_to_accuracy_s: float | None
    vs_dp: float | None  # speed-up over data parallelism: to the target or, if no run has one, of epochs
    epochs_to_target: float | None
    epoch_time_s: float | None
    comm_bytes_per_sample: float | None
    peak_memory_bytes_max: float | None
    bubble_fraction: float | None
    num_devices: float | None  # None unless a sweep varies it
    speed_up: float | None  # of epochs, over the row with the fewest devices; None unless a sweep varies devices
    efficiency: float | None  # that speed-up over the ratio of devices
    # Smallest and largest value of metrics in which the runs differ; infinity if a target was missed
    ranges: Mapping[str, tuple[float, float]]

    @property
    def is_partial(self) -> bool:
        """Whether some of its runs reached their target, and some missed it."""
        return 0 < self.num_reached < self.num_targeted

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, with `<metric>_min` and `<metric>_max` for metrics in which its runs differ.

        The maximum is None if a run missed its target.
        """
        row = {name: value for name, value in vars(self).items() if name != "ranges"}
        for metric, (low, high) in self.ranges.items():
            row |= {f"{metric}_min": low, f"{metric}_max": high if math.isfinite(high) else None}
        return row

    def text(self, metric: str, say: _Format) -> str:
        """Return a metric's median and, if its runs differ, their range."""
        value = getattr(self, metric)
        if value is None:
            is_missed = metric == _TO_TARGET and self.outcome != COMPLETED
            return ", ".join(each for each in self.outcome.split(", ") if each != REACHED) if is_missed else UNKNOWN
        ends = self.ranges.get(metric, (value, value))
        middle, low, high = (say(each) if math.isfinite(each) else MISSED for each in (value, *ends))
        return middle if low == high else f"{middle} [{low} to {high}]"


def _count(value: float) -> str:
    return f"{value:g}" if value == int(value) else number(value)


_UPDATE = "samples_per_update"
_TO_TARGET, _OF_EPOCHS = "time_to_accuracy_s", "epoch_time_s"
_VS_DP = ("vs dp", "vs_dp", ratio)
# Heading, attribute of `ComparisonRow`, formatter; columns without any value are left out.
_COLUMNS: tuple[tuple[str, str, _Format], ...] = (
    ("samples per update", _UPDATE, _count),
    ("samples/s", "throughput_samples_per_s", number),
    ("time to accuracy", "time_to_accuracy_s", seconds),
    _VS_DP,
    ("epochs", "epochs_to_target", _count),
    ("epoch time", "epoch_time_s", seconds),
    ("bytes per sample", "comm_bytes_per_sample", num_bytes),
    ("memory", "peak_memory_bytes_max", num_bytes),
    ("bubble", "bubble_fraction", percent),
    ("devices", "num_devices", _count),
    ("speed-up", "speed_up", ratio),
    ("efficiency", "efficiency", percent),
)
_METRICS = tuple(metric for _, metric, _ in _COLUMNS[:-3] if metric != "vs_dp")


@dataclass(frozen=True)
class RunGroup:
    """Rows that may be compared with each other."""

    title: str  # the keys in which the group differs from others; empty for a single group
    entries: tuple[ComparedRun, ...]
    rows: tuple[ComparisonRow, ...]  # the values of each entry


def groups(results: Sequence[RunResult]) -> list[RunGroup]:
    """Return a row per recipe in groups of comparable rows; groups are in the order of their first runs."""
    runs: dict[str, list[RunResult]] = {}
    for result in results:
        runs.setdefault(result.name, []).append(result)
    found: dict[frozenset[tuple[str, str]], list[ComparedRun]] = {}
    for name, each in runs.items():
        entry = ComparedRun(name, tuple(each))
        found.setdefault(frozenset(_shared(entry).items()), []).append(entry)
    titles = _titles([_shared(entries[0]) for entries in found.values()])
    keeps_order = any(quantity(text) is not None for result in results for text in result.varied.values())
    metric, sign = (_TO_TARGET, 1) if _has_target(results) else ("throughput_samples_per_s", -1)

    def cost(entry: ComparedRun) -> float:
        value = entry.median(metric)
        return math.inf if value is None else sign * value

    grouped = [tuple(each if keeps_order else sorted(each, key=cost)) for each in found.values()]
    return [RunGroup(title, each, _rows_of(results, each)) for title, each in zip(titles, grouped, strict=True)]


def _rows_of(results: Sequence[RunResult], entries: Sequence[ComparedRun]) -> tuple[ComparisonRow, ...]:
    """Return the rows of a group of `results`."""
    names = short_names([*dict.fromkeys(result.name for result in results)])
    has_target, scales = _has_target(results), _scales(results)
    usual = entries[0].median(_UPDATE)
    found = []
    for entry in entries:
        first = entry.runs[0]
        values = {metric: values_of(entry.runs, metric) for metric in _METRICS}
        base = baseline(entry, entries)
        scaled = (entry.num_devices, *scaling(entry, entries)) if scales else (None, None, None)
        found.append(
            ComparisonRow(
                names[entry.name], first.mode, first.plan, _is_dp(first),
                len({usual, median(values[_UPDATE])} - {None}) > 1,
                ", ".join(dict.fromkeys(run.outcome for run in entry.runs)),
                sum(run.outcome == REACHED for run in entry.runs), sum(run.has_target for run in entry.runs),
                vs_dp=speed_up(entry, base, _TO_TARGET if has_target else _OF_EPOCHS),
                **{metric: median(each) for metric, each in values.items()},
                **dict(zip(("num_devices", "speed_up", "efficiency"), scaled, strict=True)),
                ranges={metric: (min(each), max(each)) for metric, each in values.items() if len({*each}) > 1},
            )
        )  # fmt: skip
    return tuple(found)


def headings(results: Sequence[RunResult]) -> tuple[str, ...]:
    """Return the headings of `rows`, without columns that have no value.

    Several seeds add a column with the number that reached the target. A sweep over the number of devices adds that
    number, the speed-up of epochs over its first number, and the efficiency per device.
    """
    counted = (REACHED_HEADING,) if has_seeds(results) else ()
    return ("run", "plan", *counted, *(heading for heading, _, _ in _columns(results)))


def rows(results: Sequence[RunResult], group: RunGroup) -> list[tuple[str, ...]]:
    """Return one row of texts per recipe of a group of `results`, under `headings`.

    A run that missed its target or diverged shows its outcome instead of a time. Several seeds show the median and, if
    they differ, the range, which ends with `missed` if one of them missed its target. Samples per update are marked if
    they differ from the first row's.
    """
    counted, columns, table = has_seeds(results), _columns(results), []
    for row in group.rows:
        cells = [row.text(metric, say) for _, metric, say in columns]
        if row.is_marked:
            cells[0] += MARK
        share = f"{row.num_reached} of {row.num_targeted}" if row.num_targeted else UNKNOWN
        table.append((row.name, f"{row.plan} = dp" if row.is_dp else row.plan, *((share,) if counted else ()), *cells))
    return table


def _columns(results: Sequence[RunResult]) -> list[tuple[str, str, _Format]]:
    found = [row for group in groups(results) for row in group.rows]
    unfinished = any(row.outcome != COMPLETED for row in found)  # whose outcome is in the column of times

    def is_shown(metric: str) -> bool:
        known = any(getattr(row, metric) is not None for row in found)
        return known or (unfinished and metric == _TO_TARGET)

    return [column for column in _COLUMNS if is_shown(column[1])]


def _is_dp(run: RunResult) -> bool:
    """Return whether a run's mode allows several stages but its plan is data parallelism."""
    mode = MODES.get(run.mode)
    has_choice = mode is not None and not mode.is_one_stage
    return has_choice and len(run.stages) == 1 and run.stages[0].get("replicas", 1) > 1


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without a newline at the end."""
    every = (head, ["---"] * len(head), *lines)
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in every)


def notes(results: Sequence[RunResult]) -> list[str]:
    """Return the runs' notes, a line each, with the names of the rows that have the note."""
    names: dict[str, list[str]] = {}
    for entry, row in (pair for group in groups(results) for pair in zip(group.entries, group.rows, strict=True)):
        for fact, note in (item for run in entry.runs for item in run.notes.items()):
            names.setdefault(f"{fact}: {note}", []).append(row.name)
    return [f"{', '.join(dict.fromkeys(who))}: {note}" for note, who in names.items()]


def baseline(entry: ComparedRun, others: Iterable[ComparedRun]) -> ComparedRun | None:
    """Return a row's dp baseline, which has the same setting and the same seeds; None without one.

    Of several, as in a sweep over learning rates, it is the first of those that share most varied values with the row.
    """
    seeds = {run.seed for run in entry.runs}
    fitting = (other for other in others if other.runs[0].mode == BASELINE_MODE and other.setting == entry.setting)
    return _closest(entry, [other for other in fitting if {run.seed for run in other.runs} == seeds])


def time_to_accuracy_s(result: RunResult) -> float | None:
    """Return the time to accuracy of a run that reached its target, else None."""
    return result.metrics.get("time_to_accuracy_s") if result.outcome == REACHED else None


def speed_up(entry: ComparedRun, base: ComparedRun | None, metric: str = _TO_TARGET) -> float | None:
    """Return how many times as fast as the baseline a row is, by medians of the seconds `metric`; None if unknown."""
    return None if base is None else _divided(base.median(metric), entry.median(metric))


def speed_ups(results: Sequence[RunResult]) -> dict[tuple[str, int | None], dict[str, float]]:
    """Return the speed-ups over data parallelism, by run and by row, under their tracked names.

    Returns:
        By name and seed: `speedup_over_dp`, to the target, and `epoch_speedup_over_dp`, of epochs, over the dp run of
        the same group and seed; unknown ones are left out. The seed None stands for the row, by medians.
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
    names = {"speedup_over_dp": _TO_TARGET, "epoch_speedup_over_dp": _OF_EPOCHS}
    values = {name: speed_up(entry, base, metric) for name, metric in names.items()}
    return {name: value for name, value in values.items() if value is not None}


def smallest(entry: ComparedRun, others: Iterable[ComparedRun]) -> ComparedRun:
    """Return the baseline of a row's scaling: a row of its sweep with the first row's number of devices.

    Of several it is the one that shares most varied values with the row.
    """
    own = [other for other in others if other.recipe_name == entry.recipe_name]
    return _closest(entry, [other for other in own if other.num_devices == own[0].num_devices]) or entry


def _closest(entry: ComparedRun, others: Sequence[ComparedRun]) -> ComparedRun | None:
    """Return the first of the rows that share most varied values with a row; None without any."""
    varied = entry.varied.items()
    return max(others, key=lambda other: len(varied & other.varied.items()), default=None)


def scaling(entry: ComparedRun, others: Iterable[ComparedRun]) -> tuple[float | None, float | None]:
    """Return a row's speed-up of epochs over `smallest`, and that speed-up divided by the ratio of devices."""
    first = smallest(entry, others)
    faster = speed_up(entry, first, _OF_EPOCHS)
    return faster, _divided(faster, _divided(entry.num_devices, first.num_devices))


def _scales(results: Sequence[RunResult]) -> bool:
    """Return whether a sweep varies the number of devices by a key of `_COUNTING`, not only by idle workers."""
    numbers: dict[str, set[float]] = {}
    for result in results:
        entry = ComparedRun(result.name, (result,))
        if entry.num_devices is not None and any(key in result.varied for key in _COUNTING):
            numbers.setdefault(entry.recipe_name, set()).add(entry.num_devices)
    return any(len(each) > 1 for each in numbers.values())


def _shared(entry: ComparedRun) -> dict[str, str]:
    """Return a row's setting without the keys that its sweep varies: rows that agree in it share a group."""
    return {key: value for key, value in entry.setting.items() if key not in entry.varied}


def has_seeds(results: Sequence[RunResult]) -> bool:
    """Return whether some runs differ in their seed only."""
    return len({result.name for result in results}) < len(results)


def _titles(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys and values in which each setting differs from the others, as on the command line."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    differing = [key for key in keys if len({setting.get(key) for setting in settings}) > 1]
    return [" ".join(f"{key}={setting[key]}" for key in differing if key in setting) for setting in settings]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the names without their common beginning up to a dash, by full name.

    A sweep's varied values and modes come last: a dash there is part of a value.
    """
    common = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 # names, not paths
    ends = [len(name) - max((len(mode) for mode in MODES if name.endswith(f"-{mode}")), default=0) for name in names]
    common = common[: min(ends, default=0)].partition("=")[0]
    return {name: name[common.rfind("-") + 1 :] for name in names}


def _divided(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None
