"""Summaries of curves and of several seeds: best values, means and spreads, for MLflow's table of runs.

MLflow's own table shows the last value of a curve only.
"""

import math
import statistics
from collections.abc import Sequence

from pipebench.metrics import MEDIAN, METRICS, SPREAD, SPREAD_METRICS
from pipebench.train.result import REACHED, Point, RunResult
from pipebench.train.seeds import median, values_of

# Metrics whose median a group of seeds has under the metric's own name, so that it compares with single runs.
_MEDIAN = tuple(row.name for row in METRICS if row.shown & (MEDIAN | SPREAD))
_BEST = "best_"
_NOISE = 1e-9  # relative difference that another order of additions makes


def least_losses(points: Sequence[Point]) -> dict[str, float]:
    """Return `best_<loss>` of every curve that is a loss; non-finite values don't count.

    The best values of scores are in a result's metrics, as their data set defines which direction is better.
    """
    losses: dict[str, list[float]] = {}
    for point in points:
        for name, value in point.metrics.items():
            if name.endswith("_loss") and math.isfinite(value):
                losses.setdefault(name, []).append(value)
    return {f"{_BEST}{name}": min(values) for name, values in losses.items()}


def summarise_seeds(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the spread of the best scores and of `SPREAD_METRICS` over runs that differ in their seed only.

    Returns:
        `<metric>_mean`, `_std` (sample standard deviation, with two runs or more), `_median`, `_min`, `_max`;
        `runs_total` and `runs_reached`. A missed target counts as an infinite time, and infinite statistics are left
        out: mean, deviation and maximum, and the median if half or more of the runs missed it.
    """
    summary = count_reached(results)
    for metric in dict.fromkeys(name for result in results for name in result.metrics):
        if metric in SPREAD_METRICS or metric.startswith(_BEST):
            summary |= {f"{metric}_{name}": value for name, value in _spread(values_of(results, metric)).items()}
    return summary


def seed_medians(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the medians over several runs of `Use.MEDIAN` and `Use.SPREAD` metrics, under the metrics' own names."""
    medians = {metric: median(values_of(results, metric)) for metric in _MEDIAN}
    return {metric: value for metric, value in medians.items() if value is not None}


def count_reached(results: Sequence[RunResult]) -> dict[str, float]:
    """Return `runs_total`, and `runs_reached`, how many of them reached their target."""
    return {"runs_total": float(len(results)), "runs_reached": float(sum(r.outcome == REACHED for r in results))}


def _spread(sample: Sequence[float]) -> dict[str, float]:
    """Return the finite ones of a sample's statistics."""
    if not sample:
        return {}
    if max(sample) - min(sample) <= _NOISE * max(map(abs, sample)) < math.inf:
        sample = [sample[0]] * len(sample)
    spread = {
        "mean": statistics.fmean(sample),
        "median": statistics.median(sample),
        "min": min(sample),
        "max": max(sample),
        "std": statistics.stdev(sample) if len(sample) > 1 and max(sample) < math.inf else math.inf,
    }
    return {name: value for name, value in spread.items() if math.isfinite(value)}
