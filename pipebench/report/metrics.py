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
    "effective_fraction",
    "recompute_fraction",
    "comm_stall_fraction",
    "pcie_out_fraction",
    "pcie_in_fraction",
    "comm_bytes_per_sample",
    *(f"comm_bytes_per_sample_{kind.replace('-', '_')}" for kind in TRAINING_KINDS),
    "comm_bytes_total",
    *(f"comm_bytes_{kind}" for kind in _KINDS),
    "peak_memory_bytes_max",
    "minibatch_size",
    "num_layers",
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
    "host_peak_bytes_max",
    "staleness_mean",
    "staleness_max",
)
_SIMULATED = tuple(f"{kind}_throughput_samples_per_s" for kind in ("planned", "steady", "slowest", "least", "ideal"))
# Of runs whose layers are swapped; of others nothing is copied, and nothing waits for a copy.
_SWAPPED = ("swap_bytes_out", "swap_bytes_in", "swap_stall_fraction")
# Of runs whose layers may move; of others nothing does.
_MOVED = ("repartitions", "migration_bytes", "migration_stall_s")
_ALWAYS_LIKE = re.compile(r"comm_bytes_level_\w+")
_TRAINED_LIKE = re.compile(r"(best|final)_\w+")  # metrics of the data set, by their own names
_STAGE = re.compile(r"stage_(\d+)_(\w+)")
STAGE_METRICS = (
    "num_layers",
    "depth",
    "forward_s",
    "backward_s",
    "update_s",
    "effective_fraction",
    "recompute_fraction",
    "parameter_bytes",
    "peak_memory_bytes",
)
_MEASURED_LIKE = re.compile(r"predicted_\w+|prediction_error|waiting_\w+|comm_(time|transfers)_\w+")


def metric_problem(metric: str, engine: str) -> str | None:
    """Return what is wrong with a metric of a run, as the end of a sentence, or None.

    Args:
        metric: its name.
        engine: kind of the run's engine.
    """
    kind = ENGINES[engine]
    stage = _STAGE.fullmatch(metric)
    if (
        metric in (*_ALWAYS, *_SWAPPED, *_MOVED)
        or _ALWAYS_LIKE.fullmatch(metric)
        or (stage and stage[2] in STAGE_METRICS)
    ):
        return None
    if metric in _SIMULATED:
        return None if not kind.trains else f"has no {metric}: its engine is {engine}, and only simulated runs have it"
    if metric in _TRAINED or _TRAINED_LIKE.fullmatch(metric):
        return None if kind.trains else f"has no {metric}: its engine is {engine}, which trains nothing"
    if _MEASURED_LIKE.fullmatch(metric):
        return None if kind.measures else f"has no {metric}: its engine is {engine}, which measures nothing"
    names = [*_ALWAYS, *_SWAPPED, *_MOVED, *(_TRAINED if kind.trains else _SIMULATED)]
    more = f", comm_bytes_level_*, stage_N_ with one of {', '.join(STAGE_METRICS)}" + (
        ", best_* and final_* of the data set's metrics" if kind.trains else ""
    )
    return f"unknown metric {metric[:60]!r}, allowed are {', '.join(names)}{more}{nearest(metric[:60], names)}"


def metrics_of(result: RunResult) -> Mapping[str, float]:
    """Return all numbers of a run, those of its stages, the best of its curves and its minibatch size among them."""
    size = result.recipe.get("train.minibatch_size")
    sizes = {} if size is None else {"minibatch_size": float(size)}
    sizes["num_layers"] = float(sum(stage_values(result, "num_layers")))
    stages = {
        f"stage_{index}_{name}": float(row[name])
        for index, row in enumerate(result.stages)
        for name in STAGE_METRICS
        if name in row
    }
    return {**sizes, **stages, **summarise_curves(result.points), **result.metrics}


def stage_values(result: RunResult, metric: str) -> list[float]:
    """Return one of `STAGE_METRICS` of every stage of a run; nothing where it hasn't got it."""
    return [float(row[metric]) for row in result.stages if metric in row]


def value_of(result: RunResult, metric: str) -> float | str:
    """Return a metric of a run, or why it has none, in a few words.

    Bytes of a kind or level that nothing was sent over are 0, and so is what a run that neither swaps nor moves has of
    that.
    """
    found = metrics_of(result).get(metric)
    if found is not None and (metric not in TARGET_METRICS or result.outcome not in (MISSED, DIVERGED)):
        return found
    if metric in TARGET_METRICS and result.outcome in (MISSED, DIVERGED):
        return result.outcome
    return 0.0 if metric.startswith(_BYTES) or metric in (*_SWAPPED, *_MOVED) else f"the run has no {metric}"
