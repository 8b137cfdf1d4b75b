"""Records when stages were cut anew, as a file, a table and pictures."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipebench.extensions.moves.cuts_over_time import cuts_figure, cuts_markdown
from pipebench.extensions.moves.moves_file import FILE_NAME, to_text
from pipebench.extensions.moves.moves_over_time import MOVED, RATE, SENT, moves_figure
from pipebench.extensions.moves.planned import under
from pipebench.model.plan_layers import form_of
from pipebench.run.drawings import record_drawn
from pipebench.show.inline import writes
from pipebench.tracking import RunLog
from pipebench.train.job import Job
from pipebench.train.periods import Periods
from pipebench.train.result import RunResult


def record(log: RunLog, result: RunResult, job: Job) -> RunResult:
    """Record when stages were recut, and the resulting plan; return the result without them."""
    if not result.moves:
        return result
    layers = [layer.name for layer in job.setup.graph.layers]
    log.text(FILE_NAME, to_text(result.moves))
    log.text("plan-last.json", form_of(under(job.setup, result.moves), layers).text())
    log.text("cuts.md", cuts_markdown(result.moves))
    end = Periods.of(job.recipe.train, job.setup.sampler.minibatches_per_epoch).total
    drawings: dict[str, Callable[[Path], None]] = {"cuts.png": writes(cuts_figure, result.moves, layers, end)}
    if all({RATE, SENT, MOVED} <= point.metrics.keys() for point in result.points):
        drawings["moves.png"] = writes(moves_figure, result.points, result.moves)
    record_drawn(log, drawings, "cuts over time")
    return replace(result, moves=())
