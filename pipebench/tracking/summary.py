"""Summaries of curves and of several seeds, which MLflow's own table can't compute.

The table shows the last value of a curve; people compare by the best one, and by mean and spread over seeds.
"""

import math
import statistics
from collections.abc import Sequence

from pipebench.metrics import MEDIAN, METRICS, SPREAD, SPREAD_METRICS
from pipebench.train.result import REACHED, Point, RunResult
from pipebench.train.seeds import median, values_of

# Of which a group of seeds gets the median, under the same name: its row then stands beside single runs.
_MEDIAN = tuple(row.name for row in METRICS if row.shown & (MEDIAN | SPREAD))
_BEST = "best_"
_NOISE = 1e-9  # relative: values this close differ in the order of additions only


def least_losses(points: Sequence[Point]) -> dict[str, float]:
    """Return `best_<loss>` of every curve that is a loss; non-finite values don't count.

    Those of scores are in a result's metrics: their data set says which direction is better.
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
        `runs_total` and `runs_reached`. What a target that was missed makes infinite is left out: mean, deviation and
        maximum, and the median if half or more missed it.
    """
    summary = count_reached(results)
    for metric in dict.fromkeys(name for result in results for name in result.metrics):
        if metric in SPREAD_METRICS or metric.startswith(_BEST):
            summary |= {f"{metric}_{name}": value for name, value in _spread(values_of(results, metric)).items()}
    return summary


def seed_medians(results: Sequence[RunResult]) -> dict[str, float]:
    """Return the medians over several runs of the metrics listed for it, under the metrics' own names."""
    medians = {metric: median(values_of(results, metric)) for metric in _MEDIAN}
    return {metric: value for metric, value in medians.items() if value is not None}


def count_reached(results: Sequence[RunResult]) -> dict[str, float]:
    """Return `runs_total`, and `runs_reached`, how many of them reached their target."""
    return {"runs_total": float(len(results)), "runs_reached": float(sum(r.outcome == REACHED for r in results))}


def _spread(sample: Sequence[float]) -> dict[str, float]:
    """Return what is finite of a sample's statistics."""
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
