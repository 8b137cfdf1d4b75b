"""Values over runs that differ in their seed only: a target that was missed counts as reached after infinite time.

So a median is over all seeds, and is undefined if half of them or more missed. Over the seeds that reached the target
only, a mode that mostly fails would look as fast as its luckiest seed. MLPerf ranks failed runs the same way.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from pipebench.metrics import METRICS, TARGET
from pipebench.train.result import REACHED, RunResult

_OF_TARGET = frozenset(row.name for row in METRICS if row.of == TARGET)


def values_of(results: Iterable[RunResult], metric: str) -> list[float]:
    """Return a metric of all runs that have it, infinite where it is of a target that the run missed; without NaN."""
    return [value for value in (_value_of(result, metric) for result in results) if not math.isnan(value)]


def _value_of(result: RunResult, metric: str) -> float:
    if metric in _OF_TARGET and result.outcome != REACHED:
        return math.inf if result.has_target else math.nan
    return result.metrics.get(metric, math.nan)


def median(values: Sequence[float]) -> float | None:
    """Return the median; None if there are no values, or it is infinite."""
    middle = statistics.median(values) if values else math.inf
    return middle if math.isfinite(middle) else None
