"""Converts a run's log entries to MLflow's metrics, tags and texts."""

import csv
import io
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from urllib.parse import quote

from pipebench.metrics import COLUMN, METRICS, known, ranked
from pipebench.tracking.limits import MAX_TAG_CHARS
from pipebench.tracking.record import LogEntry, Status
from pipebench.tracking.summary import least_losses
from pipebench.train.result import DIVERGED, INTERRUPTED, RunResult

# The metrics by which runs are compared, most important first: MLflow lists metrics in the order in which it got them.
# The others are in the artifact result.json only, as hundreds of metrics would hide the dozen that matter.
_METRICS = tuple(row.name for row in METRICS if COLUMN in row.shown)
# A prefix of metrics. MLflow's page of charts shows them in a section of their own, before the single values.
CURVES = "curves/"
VIRTUAL_TIME = f"{CURVES}virtual_time_s"
# Significant digits of single values, as MLflow's table prints all digits. `pipebench runs` rounds them again, to six
# at most: with three more, it prints the same as from the unrounded result.
_DIGITS = 9
DESCRIPTION = "mlflow.note.content"  # the tag that MLflow shows as a run's description
_RUN_ID = "@" * 32  # stands for MLflow's id of the run, and is as long
_CUT = "(The artifacts hold the rest.)"


def values_of(entry: LogEntry, *, virtual: bool) -> tuple[dict[str, float], int]:
    """Return the values of an entry by metric, and their step.

    Virtual seconds are a metric, which MLflow offers as an axis. They can't be MLflow's timestamps, which are whole
    milliseconds and order the runs: a run may have 0.2 or 200,000 virtual seconds.
    """
    point, result = entry.point, entry.result
    if point is not None:
        curves = {**point.metrics, **({"virtual_time_s": point.clock_s} if virtual else {})}
        return {f"{CURVES}{name}": value for name, value in curves.items()}, point.samples
    if result is not None:  # at step 0, as MLflow would draw other steps as a curve of one point
        return logged_metrics(result), 0
    return dict(entry.metrics), entry.step


def tags_of(entry: LogEntry, run_id: str) -> dict[str, str]:
    """Return an entry's tags, a result's included, with the run's id filled in."""
    if DESCRIPTION in entry.tags:
        return {**entry.tags, DESCRIPTION: entry.tags[DESCRIPTION].replace(_RUN_ID, run_id)}
    if entry.result is None:
        return dict(entry.tags)
    notes = {f"note.{fact.replace(' ', '_')}": note for fact, note in entry.result.notes.items()}
    return {**entry.tags, "outcome": entry.result.outcome, **notes}


def outcome_status(result: RunResult | None) -> Status:
    """Return a result's status: FAILED if the run diverged, KILLED if it was interrupted."""
    if result is None or result.outcome == DIVERGED:
        return "FAILED"
    return "KILLED" if result.outcome == INTERRUPTED else "FINISHED"


def logged_metrics(result: RunResult) -> dict[str, float]:
    """Return a result's metrics for comparing runs, the most important first, rounded for display."""
    values = {**least_losses(result.points), **result.metrics}
    ordered = dict.fromkeys(name for pattern in _METRICS for name in values if fnmatchcase(name, pattern))
    ordered |= dict.fromkeys(name for name in values if (row := known(name)) is not None and COLUMN in row.shown)
    return ranked({name: shown_value(values[name]) for name in ordered}, result.clock)


def shown_value(value: float) -> float:
    """Return a value rounded for display; whole numbers stay exact."""
    return value if float(value).is_integer() else float(f"{value:.{_DIGITS}g}")


def stages_csv(result: RunResult) -> str:
    """Return a CSV table with a row per stage; "" without stages."""
    columns = dict.fromkeys(name for stage in result.stages for name in stage)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(stage) for stage in result.stages)
    return text.getvalue() if columns else ""


def logged_params(recipe: Mapping[str, str]) -> dict[str, str]:
    """Return a flattened recipe without keys that are null, which would be empty columns of MLflow's table."""
    return {name: value for name, value in recipe.items() if value != "null"}


def description(markdown: str, pictures: Sequence[str]) -> str:
    """Return a run's description in MLflow: `markdown`, cut to MLflow's limit, then picture artifacts.

    The run's id is filled in by `tags_of`, once MLflow has assigned it.
    """
    # Relative addresses, which also work on a server whose pages are below a path.
    links = [f"![{name}](get-artifact?path={quote(name)}&run_uuid={_RUN_ID})" for name in pictures]
    text = "\n\n".join([markdown, *links])
    if len(text) <= MAX_TAG_CHARS:
        return text
    rest = "\n\n".join([_CUT, *links])
    whole_lines = markdown[: MAX_TAG_CHARS - len(rest) - 2].rpartition("\n")[0]
    return f"{whole_lines}\n\n{rest}"
