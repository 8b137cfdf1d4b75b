"""Runs side by side: one row each, with the speed-up over data parallelism, as the console and MLflow show them."""

import os
from collections.abc import Sequence

from pipebench.formats import UNKNOWN, num_bytes, number, percent, ratio, seconds
from pipebench.result import COMPLETED, REACHED, RunResult

HEADINGS = (
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
BASELINE_MODE = "dp"


def comparison_rows(results: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """Return one row of texts per run, under `HEADINGS`; a run that missed or diverged says so instead of a time."""
    names = _short_names(results)
    return [_row(name, result, baseline(result, results)) for name, result in zip(names, results, strict=True)]


def comparison_markdown(results: Sequence[RunResult]) -> str:
    """Return the comparison as a Markdown table, followed by what became of every run in a sentence each."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *comparison_rows(results)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    sentences = "\n".join(f"- {line}" for line in [*(f"{r.name}: {r.sentence}" for r in results), *notes(results)])
    return f"{table}\n\n{sentences}\n"


def notes(results: Sequence[RunResult]) -> list[str]:
    """Return what to know of some runs' numbers: a line per note, with the names of all runs that have it."""
    names: dict[str, list[str]] = {}
    for name, result in zip(_short_names(results), results, strict=True):
        for fact, note in result.notes.items():
            names.setdefault(f"{fact}: {note}", []).append(name)
    return [f"{', '.join(dict.fromkeys(who))}: {note}" for note, who in names.items()]


def baseline(result: RunResult, results: Sequence[RunResult]) -> RunResult | None:
    """Return the dp run a result is measured against: the one with its seed if there is one, else the first."""
    candidates = [other for other in results if other.mode == BASELINE_MODE]
    same_seed = [other for other in candidates if other.seed == result.seed]
    return next(iter(same_seed or candidates), None)


def time_to_accuracy_s(result: RunResult) -> float | None:
    """Return the time to accuracy of a run that has one: only a run that reached its target."""
    return result.metrics.get("time_to_accuracy_s") if result.outcome == REACHED else None


def speed_up(result: RunResult, base: RunResult | None) -> float | None:
    """Return how many times sooner than the baseline a run reached the target, None where either didn't."""
    return None if base is None else _divided(time_to_accuracy_s(base), time_to_accuracy_s(result))


def epoch_speed_up(result: RunResult, base: RunResult | None) -> float | None:
    """Return how many times faster than the baseline's a run's epochs are."""
    if base is None:
        return None
    return _divided(base.metrics.get("epoch_time_s"), result.metrics.get("epoch_time_s"))


def _row(name: str, result: RunResult, base: RunResult | None) -> tuple[str, ...]:
    metrics = result.metrics
    reached_s = time_to_accuracy_s(result)
    no_time = UNKNOWN if result.outcome in (REACHED, COMPLETED) else result.outcome
    epochs = metrics.get("epochs_to_target") if result.outcome == REACHED else None
    return (
        name,
        result.plan,
        no_time if reached_s is None else seconds(reached_s),
        ratio(speed_up(result, base)),
        UNKNOWN if epochs is None else f"{epochs:g}" if epochs == int(epochs) else number(epochs),
        seconds(metrics.get("epoch_time_s")),
        ratio(epoch_speed_up(result, base)),
        num_bytes(metrics.get("comm_bytes_per_sample")),
        num_bytes(metrics.get("peak_memory_bytes_max")),
        percent(metrics.get("bubble_fraction")),
    )


def _short_names(results: Sequence[RunResult]) -> list[str]:
    """Drop what all names begin with, up to a dash: in a comparison only the rest tells runs apart."""
    names = [result.name for result in results]
    common = os.path.commonprefix(names) if len(set(names)) > 1 else ""  # noqa: RUF071 # names, not paths
    return [name[common.rfind("-") + 1 :] for name in names]


def _divided(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None
