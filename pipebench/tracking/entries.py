"""What waits in a run's queue until MLflow has taken it, and what is made of a result for it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from pipebench.tracking.store import MAX_TAG_CHARS, Row
from pipebench.train.result import DIVERGED, INTERRUPTED, RunResult

Status = Literal["FINISHED", "FAILED", "KILLED"]

# Columns of RunResult.stages that are metrics of their own, as `<column>/stage_<index>`; the rest, and what concerns
# single workers, is in the artifact result.json: hundreds of metrics hide the dozen that people compare runs by.
STAGE_METRICS = ("samples_per_update", "peak_memory_bytes")
# Likewise of RunResult.metrics: what a curve ends with MLflow shows itself, totals by kind are bytes per sample times
# samples, and single kinds of waiting and transfer concern who looks at one run.
_DETAILS = re.compile(r"final_.*|comm_bytes_(activation|gradient|all_reduce)|comm_(transfers|time)_.*|waiting_(?!s$).*")
DESCRIPTION = "mlflow.note.content"  # the tag that MLflow shows as a run's description
_CUT = "(The artifacts hold the rest.)"


@dataclass(frozen=True)
class Entries:
    """Values, params and tags.

    Attributes:
        rows: values of metrics.
        params: as MLflow takes them.
        tags: likewise.
        clocked: the rows' timestamps are on the wall clock of the run: they move with its start if it began in another
            process.
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
    """The end of the run."""

    status: Status
    timestamp_ms: int


def outcome_status(result: RunResult | None) -> Status:
    """Return the status a result gives its run: a run that diverged is FAILED, an interrupted one KILLED."""
    if result is None or result.outcome == DIVERGED:
        return "FAILED"
    return "KILLED" if result.outcome == INTERRUPTED else "FINISHED"


def stage_metrics(result: RunResult) -> dict[str, float]:
    """Return `<column>/stage_<index>` of the columns that are metrics, in an order that MLflow's sorting keeps."""
    width = len(str(max(0, len(result.stages) - 1)))
    return {
        f"{column}/stage_{stage.get('index', index):0{width}d}": float(stage[column])
        for index, stage in enumerate(result.stages)
        for column in STAGE_METRICS
        if isinstance(stage.get(column), int | float)
    }


def logged_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a result by which people compare runs; the others are in the artifact result.json."""
    return {name: value for name, value in metrics.items() if not _DETAILS.fullmatch(name)}


def logged_params(recipe: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a flattened recipe that say something: those that are null are not worth a column each."""
    return {name: value for name, value in recipe.items() if value != "null"}


def description(markdown: str, pictures: Sequence[str], run_id: str | None) -> str:
    """Return what MLflow shows first of a run: the pictures, which are its artifacts, then a text, cut to its limit.

    Args:
        markdown: the text.
        pictures: names of artifacts.
        run_id: MLflow's id of the run, None if it has none yet: then there are no pictures.
    """
    # Seen from the page's own address, so that a server below a path finds them too.
    links = [f"![{name}](get-artifact?path={quote(name)}&run_uuid={run_id})" for name in pictures if run_id]
    text = "\n\n".join([markdown, *links])
    if len(text) <= MAX_TAG_CHARS:
        return text
    rest = "\n\n".join([_CUT, *links])
    whole_lines = markdown[: MAX_TAG_CHARS - len(rest) - 2].rpartition("\n")[0]
    return f"{whole_lines}\n\n{rest}"
