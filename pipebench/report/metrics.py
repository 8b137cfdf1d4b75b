"""Metrics available from runs of each engine; expressions with others are refused before anything runs."""

import re
from collections.abc import Mapping

from pipebench import metrics
from pipebench.errors import nearest
from pipebench.metrics import MEASURED, METRICS, SIMULATED, TARGET, TRAINED, ZERO, known, names
from pipebench.recipe.engines import ENGINES
from pipebench.tracking.summary import least_losses
from pipebench.train.result import RunResult
from pipebench.train.seeds import values_of

# Metrics of a report that are no logged metrics, but facts of the recipe.
_OF_THE_RECIPE = ("minibatch_size", "num_layers")
_STAGE = re.compile(r"stage_(\d+)_(\w+)")
STAGE_METRICS = tuple(names(metrics.STAGE_METRICS))


def metric_problem(metric: str, engine: str) -> str | None:
    """Return why runs of an engine lack a metric, as the end of a sentence, or None."""
    kind = ENGINES[engine]
    stage, row = _STAGE.fullmatch(metric), known(metric)
    if metric in _OF_THE_RECIPE or (stage and stage[2] in STAGE_METRICS):
        return None
    lacking = {
        SIMULATED: "and only simulated runs have it" if kind.trains else "",
        TRAINED: "" if kind.trains else "which trains nothing",
        TARGET: "" if kind.trains else "which trains nothing",
        MEASURED: "" if kind.measures else "which measures nothing",
    }
    if row is not None:
        why = lacking.get(row.of, "")
        return f"has no {metric}: its engine is {engine}, {why}" if why else None
    allowed = [*_OF_THE_RECIPE, *names(row for row in METRICS if not lacking.get(row.of))]
    more = f", comm_bytes_level_*, stage_N_ with one of {', '.join(STAGE_METRICS)}" + (
        ", best_* and final_* of the data set's metrics" if kind.trains else ""
    )
    return f"unknown metric {metric[:60]!r}, allowed are {', '.join(allowed)}{more}{nearest(metric[:60], allowed)}"


def metrics_of(result: RunResult) -> Mapping[str, float]:
    """Return all numbers of a run: minibatch size, stages, best of curves, logged metrics."""
    size = result.recipe.get("train.minibatch_size")
    sizes = {} if size is None else {"minibatch_size": float(size)}
    sizes["num_layers"] = float(sum(stage_values(result, "num_layers")))
    stages = {
        f"stage_{index}_{name}": float(row[name])
        for index, row in enumerate(result.stages)
        for name in STAGE_METRICS
        if name in row
    }
    return {**sizes, **stages, **least_losses(result.points), **result.metrics}


def stage_values(result: RunResult, metric: str) -> list[float]:
    """Return one of `STAGE_METRICS` per stage; empty if the run lacks it."""
    return [float(row[metric]) for row in result.stages if metric in row]


def value_of(result: RunResult, metric: str) -> float | str:
    """Return a metric of a run, or a few words on why it has none; infinity for a time to a target that was missed.

    Bytes of a kind or level without traffic are 0, as are metrics of swaps or moves in a run without any.
    """
    found = next(iter(values_of([result], metric)), metrics_of(result).get(metric))
    if found is not None:
        return found
    row = known(metric)
    return 0.0 if row is not None and ZERO in row.shown else f"the run has no {metric}"
