"""What waits in a run's queue until MLflow has taken it, and what is made of a result for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipebench.result import DIVERGED, INTERRUPTED, RunResult
from pipebench.tracking.store import Row

Status = Literal["FINISHED", "FAILED", "KILLED"]

# Columns of RunResult.stages that are metrics of their own, as `<column>/stage_<index>`.
STAGE_METRICS = ("samples_per_update", "weight_versions_max", "peak_memory_bytes")
_MEASURES = ("_s", "_fraction")  # how columns of RunResult.workers end that are metrics, as `worker_<index>/<column>`


@dataclass(frozen=True)
class Entries:
    """Values, params and tags.

    Attributes:
        rows: values of metrics.
        params: as MLflow takes them.
        tags: likewise.
        clocked: the rows' timestamps are on the run's clock: they move with its start if it began in another process.
        curve: the rows are of a curve: a metric has at most one value at a step.
    """

    rows: tuple[Row, ...] = ()
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    clocked: bool = False
    curve: bool = False


@dataclass(frozen=True)
class Artifact:
    """A file of the run; its name may hold folders."""

    name: str
    content: bytes


@dataclass(frozen=True)
class End:
    """The end of the run; `clocked` as for `Entries`."""

    status: Status
    timestamp_ms: int
    clocked: bool


def outcome_status(result: RunResult | None) -> Status:
    """Return the status a result gives its run: a run that diverged is FAILED, an interrupted one KILLED."""
    if result is None or result.outcome == DIVERGED:
        return "FAILED"
    return "KILLED" if result.outcome == INTERRUPTED else "FINISHED"


def stage_metrics(result: RunResult) -> dict[str, float]:
    """Return `<column>/stage_<index>` of the columns that are metrics."""
    return {
        f"{column}/stage_{stage.get('index', index)}": float(stage[column])
        for index, stage in enumerate(result.stages)
        for column in STAGE_METRICS
        if isinstance(stage.get(column), int | float)
    }


def worker_metrics(result: RunResult) -> dict[str, float]:
    """Return `worker_<index>/<column>` of the measures that any worker has, in an order that MLflow's sorting keeps."""
    width = len(str(max(0, len(result.workers) - 1)))
    columns = [column for column in (result.workers or ({},))[0] if column.endswith(_MEASURES)]
    return {
        f"worker_{index:0{width}d}/{column}": float(row[column])
        for column in columns
        if any(row.get(column) for row in result.workers)
        for index, row in enumerate(result.workers)
        if isinstance(row.get(column), int | float)
    }
