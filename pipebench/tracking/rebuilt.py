"""Rebuilds a run's result from MLflow's metrics, params and tags, for a run whose artifacts can't be read."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipebench.metrics import unranked
from pipebench.tracking.entries import CURVES, VIRTUAL_TIME
from pipebench.tracking.system import SYSTEM
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

LACKS = "stages, sentences and what a sweep varies"  # the parts of a comparison that a rebuilt result lacks


def rebuilt(client: "MlflowClient", run: "Run") -> RunResult | None:
    """Return the result of a run that has ended, without the parts in `LACKS`; None if it has none.

    Tags may have been edited: a run whose outcome or seed isn't valid has no result. Raises MLflow's own exceptions.
    """
    tags = run.data.tags
    recipe = {name: tags.get(f"resumed.{name}", value) for name, value in run.data.params.items()}
    seed, outcome = recipe.get("train.seed", ""), tags.get("outcome")
    if outcome not in (REACHED, MISSED, DIVERGED, COMPLETED, INTERRUPTED) or not seed.isdecimal():
        return None
    if run.info.status == "RUNNING":
        return None

    def fact(name: str) -> str:
        return tags.get(f"resumed.{name}", tags.get(name, ""))

    clock = tags.get("clock", "virtual")
    single = {name: each for name, each in run.data.metrics.items() if not name.startswith((CURVES, SYSTEM))}
    return RunResult(
        name=tags.get("called") or recipe.get("name", str(run.info.run_name)),
        mode=fact("mode"),
        plan=fact("plan"),
        engine=fact("engine"),
        clock=clock,
        timing=fact("timing"),
        seed=int(seed),
        outcome=outcome,
        sentence=outcome,
        metrics=unranked({name: each for name, each in single.items() if math.isfinite(each)}),
        points=_points(client, run, virtual=clock == "virtual"),
        recipe=recipe,
    )


def _points(client: "MlflowClient", run: "Run", *, virtual: bool) -> tuple[Point, ...]:
    """Return the curves; of several values at a step, the one logged last counts."""
    values: dict[int, dict[str, float]] = {}
    clocks_s: dict[int, float] = {}
    for metric in run.data.metrics:
        if metric.startswith(CURVES):
            for row in sorted(client.get_metric_history(run.info.run_id, metric), key=lambda row: int(row.timestamp)):
                values.setdefault(row.step, {})[metric] = row.value
                clocks_s[row.step] = (row.timestamp - run.info.start_time) / 1000
    return tuple(_point(step, values[step], None if virtual else clocks_s[step]) for step in sorted(values))


def _point(samples: int, curves: Mapping[str, float], clock_s: float | None) -> Point:
    metrics = {name.removeprefix(CURVES): value for name, value in curves.items() if name != VIRTUAL_TIME}
    return Point(samples, curves.get(VIRTUAL_TIME, 0.0) if clock_s is None else clock_s, metrics)
