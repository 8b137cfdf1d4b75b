"""What is kept of a run in which a server applied gradients as they came: their order, and how stale they were."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipebench.extensions.asynchronous.pushes import FILE_NAME, Pushes, histogram, to_text
from pipebench.extensions.asynchronous.staleness import draw_staleness, staleness_markdown
from pipebench.run.drawings import record_drawn
from pipebench.tracking import RunLog
from pipebench.train.result import RunResult


def metrics(counted: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how stale gradients were, of the segments that servers tell of."""
    staleness = [updates for segment in counted for updates in Pushes(**segment).staleness]
    return {"staleness_mean": sum(staleness) / len(staleness), "staleness_max": max(staleness)} if staleness else {}


def fields(counted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result's field."""
    return {"pushes": tuple(Pushes(**segment) for segment in counted)}


def record(log: RunLog, result: RunResult) -> RunResult:
    """Keep the order in which a server applied gradients, and how stale they were; return the result without it."""
    if not result.pushes:
        return result
    counts = histogram(result.pushes)
    log.text(FILE_NAME, to_text(result.pushes))
    log.text("staleness.md", staleness_markdown(counts))
    record_drawn(log, {"staleness.png": partial(draw_staleness, counts)}, "staleness")
    return replace(result, pushes=())
