"""Summaries of curves and of several seeds, which MLflow's own table can't compute.

The table shows the last value of a curve; people compare by the best one, and by mean and spread over seeds.
"""

import math
import statistics
from collections.abc import Sequence

from pipebench.metrics import MEDIAN, METRICS, SPREAD, SPREAD_METRICS, TARGET
from pipebench.train.result import REACHED, Point, RunResult

# Of which a group of seeds gets the median, under the same name: its row then stands beside single runs.
_MEDIAN = tuple(row.name for row in METRICS if row.shown & (MEDIAN | SPREAD))
_BEST = "best_"
_NOISE = 1e-9  # relative: values this close differ in the order of additions only
_OF_TARGET = tuple(row.name for row in METRICS if row.of == TARGET)
_LOWER_IS_BETTER = ("loss", "perplexity", "error")
# Curves that are a clock or a setting: their best value means nothing.
_NOT_A_SCORE = ("virtual_time_s", "wall_time_s", "epoch", "learning_rate", "lr")


def summarise_curves(points: Sequence[Point]) -> dict[str, float]:
    """Return `best_<metric>` of every curve; non-finite values don't count."""
    curves: dict[str, list[float]] = {}
    for point in points:
        for metric, value in point.metrics.items():
            if metric not in _NOT_A_SCORE and math.isfinite(value):
                curves.setdefault(metric, []).append(value)
    best = {metric: min if any(word in metric for word in _LOWER_IS_BETTER) else max for metric in curves}
    return {f"{_BEST}{metric}": best[metric](values) for metric, values in curves.items()}


def summarise_seeds(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the spread of the best scores and of `SPREAD_METRICS` over runs that differ in their seed only.

    Returns:
        `<metric>_mean`, `_std` (sample standard deviation, with two runs or more), `_median`, `_min`, `_max`;
        `runs_total` and `runs_reached`. A run that missed its target has no time to accuracy and is not part of its
        spread.
    """
    summary = count_reached(results)
    for metric, sample in _samples(results).items():
        if metric in SPREAD_METRICS or metric.startswith(_BEST):
            summary |= {f"{metric}_{name}": value for name, value in _spread(sample).items()}
    return summary


def seed_medians(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the medians over several runs of the metrics listed for it, under the metrics' own names.

    A time to the target that not all runs reached is left out: under that name MLflow ranks it with runs that did.
    """
    samples = _samples(results)
    missed = any(result.outcome != REACHED for result in results)
    names = (metric for metric in _MEDIAN if not (missed and metric in _OF_TARGET))
    return {metric: statistics.median(samples[metric]) for metric in names if metric in samples}


def count_reached(results: Sequence[RunResult]) -> dict[str, float]:
    """Return `runs_total`, and `runs_reached`, how many of them reached their target."""
    return {"runs_total": float(len(results)), "runs_reached": float(sum(r.outcome == REACHED for r in results))}


def _samples(results: Sequence[RunResult]) -> dict[str, list[float]]:
    """Return the finite values of every metric; times to target only of runs that reached it."""
    values: dict[str, list[float]] = {}
    for result in results:
        for metric, value in result.metrics.items():
            if math.isfinite(value) and (result.outcome == REACHED or metric not in _OF_TARGET):
                values.setdefault(metric, []).append(value)
    return values


def _spread(sample: Sequence[float]) -> dict[str, float]:
    if max(sample) - min(sample) <= _NOISE * max(map(abs, sample)):
        sample = [sample[0]] * len(sample)
    spread = {
        "mean": statistics.fmean(sample),
        "median": statistics.median(sample),
        "min": min(sample),
        "max": max(sample),
    }
    return spread | ({"std": statistics.stdev(sample)} if len(sample) > 1 else {})
