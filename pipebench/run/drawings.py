"""Pictures and tables of a run's record; imports matplotlib.

Failures are logged: a picture must never cost a result.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pipebench.recipe.engines import engine_kind
from pipebench.run.request import RunRequest
from pipebench.run.story import PAGE, answer_of, comparison_story, story
from pipebench.show.answers import Run
from pipebench.show.figures import curves_figure
from pipebench.show.inline import writes
from pipebench.show.memory_picture import memory_figure, peaks_figure
from pipebench.show.occupancy_picture import occupancy_figure
from pipebench.show.over_time import NUM_PARTS
from pipebench.show.pictures import metric_figure, timeline_figure
from pipebench.show.plan_picture import plan_figure
from pipebench.show.sweep_lines import sweeps_of
from pipebench.show.sweep_picture import sweep_figure
from pipebench.show.trace import write_trace
from pipebench.show.verdict import comparison_markdown
from pipebench.simulate.memory_meter import MemoryTimeline
from pipebench.simulate.timeline import Timeline
from pipebench.tracking.run_log import RunLog
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.result import RunResult

_LOG = logging.getLogger("pipebench.run")


def record_run(
    log: RunLog, request: RunRequest, job: Job, result: RunResult, timeline: Timeline, forecast: MemoryForecast | None
) -> None:
    """Record a run's pictures, its page and its description, except those that its suite leaves out."""
    kind, suite = engine_kind(job.recipe), request.suite
    drawn: list[str] = []
    is_drawn = kind.trains or suite.draws
    if is_drawn:
        drawn += record_timeline(log, timeline, None if forecast is None or kind.measures else forecast.memory)
        if forecast is not None:
            drawn += record_forecast(log, forecast)
    if not suite.brief:
        if is_drawn:
            record_drawn(log, {"plan.png": lambda path: writes(plan_figure, answer_of(job))(path)}, "the plan")
            if result.points:
                record_drawn(log, {"curves.png": writes(curves_figure, [result])}, "the curves")
        _record_page_of(log, lambda: story(request, job.recipe, result, log.folder))
    log.describe(comparison_markdown([result]), [each for each in drawn if each.endswith(".png")])


def record_comparison(log: RunLog, runs: Sequence[Run]) -> list[str]:
    """Record the pictures of runs side by side, and the page that shows them; return the pictures' names."""
    pictures = record_curves(log, [run.result for run in runs])
    _record_page_of(log, lambda: comparison_story(log, runs, pictures))
    return pictures


def _record_page_of(log: RunLog, make: Callable[[], str]) -> None:
    try:
        log.text(PAGE, make())
    except Exception as error:  # a page must never cost a result
        _LOG.warning("%s has no page: %s", log.name, error)


def record_timeline(log: RunLog, timeline: Timeline, memory: MemoryTimeline | None = None) -> list[str]:
    """Record a timeline as a picture and a Perfetto trace, with memory on the same clock; return their names."""
    drawings = {"timeline.png": writes(timeline_figure, timeline)}
    drawings["trace.json"] = partial(write_trace, timeline, memory=memory)
    return record_drawn(log, drawings, "the timeline")


def record_forecast(log: RunLog, forecast: MemoryForecast) -> list[str]:
    """Record pictures of memory and occupancy over time, by parts of the run if stages are recut; return names."""
    occupancy, moved = forecast.occupancy(NUM_PARTS), forecast.moved
    drawings = {
        "memory.png": writes(memory_figure, forecast.memory),
        "occupancy.png": writes(occupancy_figure, occupancy),
    }
    if moved is not None:
        parts = {
            "first cuts": forecast.memory.peaks,
            "while layers move, and between moves": moved.between,
            "last cuts": moved.last.peaks,
        }
        drawings["memory-first.png"] = drawings["memory.png"]
        drawings["memory-last.png"] = writes(memory_figure, moved.last)
        whole = {part: peaks for part, peaks in parts.items() if peaks}
        drawings["memory.png"] = writes(peaks_figure, whole, forecast.memory)
    return record_drawn(log, drawings, "memory and occupancy")


def record_drawn(log: RunLog, drawings: Mapping[str, Callable[[Path], None]], what: str) -> list[str]:
    """Record artifacts written by functions; return the names of those that succeed."""
    drawn = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for artifact, write in drawings.items():
                path = Path(folder) / artifact
                write(path)
                log.file(artifact, path)
                drawn.append(artifact)
    except Exception as error:  # of any type, from matplotlib: a picture must never cost a result
        _LOG.warning("%s could not be drawn: %s", what, error)
    return drawn


def record_curves(log: RunLog, results: Sequence[RunResult]) -> list[str]:
    """Record a picture of each sweep over a quantity, and one per metric of all curves; return their names."""
    metrics = {name for result in results for point in result.points for name in point.metrics if "loss" not in name}
    sweeps = enumerate(sweeps_of(results))
    drawings = {f"sweep{index or ''}.png": writes(sweep_figure, sweep) for index, sweep in sweeps}
    drawings |= {f"{each}.png": writes(metric_figure, results, each) for each in sorted(metrics)}
    return record_drawn(log, drawings, "the curves")
