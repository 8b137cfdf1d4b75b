"""Show progress of a report's runs: a live line on a terminal, else a plain line now and then."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from pipebench.errors import printable
from pipebench.formats import seconds
from pipebench.recipe.engines import engine_kind
from pipebench.report.recipes import ReportRun
from pipebench.show.terminal import is_terminal, standard_output

SIMULATION_S = 1.5  # first estimate
_WEIGHT = 4  # the first estimate counts as so many runs, as the first run is slow because of imports
_EVERY_S = 10.0  # between plain lines


def guess(missing: Mapping[str, ReportRun], simulation_s: float = SIMULATION_S) -> str:
    """Return the estimated time of runs as text; trainings are only counted.

    Args:
        missing: runs by recipe.
        simulation_s: seconds per simulation.
    """
    trained = sum(engine_kind(each.loaded.recipe).trains for each in missing.values())
    simulated = len(missing) - trained
    parts = [f"about {seconds(max(1.0, round(simulated * simulation_s)))}"] if simulated else []
    return " and ".join([*parts, *([f"{trained} training{'s' if trained > 1 else ''}"] if trained else [])])


@contextmanager
def runs_progress(missing: Mapping[str, ReportRun]) -> Iterator[Callable[[ReportRun], None]]:
    """Show progress of consecutive runs; yields a function to call as each begins. `missing` has the runs by recipe."""
    console, total, left = standard_output(), len(missing), dict(missing)
    columns = (MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=console, transient=True, disable=not is_terminal())
    task = bar.add_task("", total=total)
    simulated: list[float] = []  # seconds that each took
    running: tuple[ReportRun, float] | None = None
    next_line_s = 0.0

    def begin(run: ReportRun) -> None:
        nonlocal running, next_line_s
        now_s = time.monotonic()
        if running is not None and not engine_kind(running[0].loaded.recipe).trains:
            simulated.append(now_s - running[1])
        running = (run, now_s)
        time_left = guess(left, (sum(simulated) + _WEIGHT * SIMULATION_S) / (len(simulated) + _WEIGHT))
        for key in [key for key, each in left.items() if each is run]:
            del left[key]
        done = total - len(left) - 1
        text = printable(f"{run.row}: {run.run}{f', {run.column}' if run.column else ''}")
        bar.update(task, completed=done, description=f"{text}  {time_left} left")
        if bar.disable and now_s >= next_line_s:
            next_line_s = now_s + _EVERY_S
            console.print(Text(f"{done + 1} of {total}  {text}  {time_left} left"), soft_wrap=True)

    with bar:
        yield begin
