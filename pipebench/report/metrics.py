"""Which metrics a run of each kind of engine has: an expression that names another is refused before anything runs."""

import re
from collections.abc import Mapping

from pipebench.errors import nearest
from pipebench.recipe.engines import ENGINES
from pipebench.simulate.timeline import BUFFERS, EVALUATION, TRAINING_KINDS
from pipebench.tracking.summary import TARGET_METRICS, summarise_curves
from pipebench.train.result import DIVERGED, MISSED, RunResult

_BYTES = "comm_bytes"
_KINDS = [kind.replace("-", "_") for kind in (*TRAINING_KINDS, BUFFERS, EVALUATION)]
_ALWAYS = (
    "epoch_time_s",
    "throughput_samples_per_s",
    "total_time_s",
    "bubble_fraction",
    "comm_stall_fraction",
    "comm_bytes_per_sample",
    *(f"comm_bytes_per_sample_{kind.replace('-', '_')}" for kind in TRAINING_KINDS),
    "comm_bytes_total",
    *(f"comm_bytes_{kind}" for kind in _KINDS),
    "peak_memory_bytes_max",
    "minibatch_size",
    "samples_per_update",
    "num_workers",
)
_TRAINED = (
    *TARGET_METRICS,
    "evaluation_time_s",
    "checkpoint_time_s",
    "lost_time_s",
    "wall_time_s",
    "weight_versions_max",
    "staleness_mean",
    "staleness_max",
)
_SIMULATED = ("planned_throughput_samples_per_s",)
_ALWAYS_LIKE = re.compile(r"comm_bytes_level_\w+")
_TRAINED_LIKE = re.compile(r"(best|final)_\w+")  # metrics of the data set, by their own names
_MEASURED_LIKE = re.compile(r"predicted_\w+|prediction_error|waiting_\w+|comm_(time|transfers)_\w+")


def metric_problem(metric: str, engine: str) -> str | None:
    """Return what is wrong with a metric of a run, as the end of a sentence, or None.

    Args:
        metric: its name.
        engine: kind of the run's engine.
    """
    kind = ENGINES[engine]
    if metric in _ALWAYS or _ALWAYS_LIKE.fullmatch(metric):
        return None
    if metric in _SIMULATED:
        return None if not kind.trains else f"has no {metric}: its engine is {engine}, and only simulated runs have it"
    if metric in _TRAINED or _TRAINED_LIKE.fullmatch(metric):
        return None if kind.trains else f"has no {metric}: its engine is {engine}, which trains nothing"
    if _MEASURED_LIKE.fullmatch(metric):
        return None if kind.measures else f"has no {metric}: its engine is {engine}, which measures nothing"
    names = [*_ALWAYS, *(_TRAINED if kind.trains else _SIMULATED)]
    more = ", comm_bytes_level_*" + (", best_* and final_* of the data set's metrics" if kind.trains else "")
    return f"unknown metric {metric[:60]!r}, allowed are {', '.join(names)}{more}{nearest(metric[:60], names)}"


def metrics_of(result: RunResult) -> Mapping[str, float]:
    """Return all numbers of a run, the best values of its curves and the size of its minibatches among them."""
    size = result.recipe.get("train.minibatch_size")
    sizes = {} if size is None else {"minibatch_size": float(size)}
    return {**sizes, **summarise_curves(result.points), **result.metrics}


def value_of(result: RunResult, metric: str) -> float | str:
    """Return a metric of a run, or why it has none, in a few words.

    Bytes of a kind or level that nothing was sent over are 0.
    """
    found = metrics_of(result).get(metric)
    if found is not None and (metric not in TARGET_METRICS or result.outcome not in (MISSED, DIVERGED)):
        return found
    if metric in TARGET_METRICS and result.outcome in (MISSED, DIVERGED):
        return result.outcome
    return 0.0 if metric.startswith(_BYTES) else f"the run has no {metric}"
