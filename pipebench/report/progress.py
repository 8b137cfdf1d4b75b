"""Show progress of a report's runs: a live line on a terminal, else a plain line now and then."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from pipebench.errors import printable
from pipebench.formats import seconds
from pipebench.recipe.engines import engine_kind
from pipebench.report.recipes import Asked
from pipebench.show.terminal import is_terminal, standard_output

SIMULATION_S = 1.5  # first estimate
_WEIGHT = 4  # runs that the first estimate counts as: the first run is slow because of imports
_EVERY_S = 10.0  # between plain lines


def guess(missing: Mapping[str, Asked], simulation_s: float = SIMULATION_S) -> str:
    """Return the estimated time of runs as text; trainings are only counted.

    `simulation_s` is the time of one simulation.
    """
    trained = sum(engine_kind(each.loaded.recipe).trains for each in missing.values())
    simulated = len(missing) - trained
    parts = [f"about {seconds(max(1.0, round(simulated * simulation_s)))}"] if simulated else []
    return " and ".join([*parts, *([f"{trained} training{'s' if trained > 1 else ''}"] if trained else [])])


class RunsProgress:
    """Shows progress of consecutive runs; a context manager."""

    def __init__(self, missing: Mapping[str, Asked]) -> None:
        """Create without output; `missing` are the runs by recipe, in order."""
        self._left = dict(missing)
        self._total = len(missing)
        self._simulated: list[float] = []  # seconds that each took
        self._running: tuple[Asked, float] | None = None
        self._next_line_s = 0.0
        self._console = standard_output()
        columns = (MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=self._console, transient=True) if is_terminal() else None
        if self._bar is not None:
            self._bar.add_task("", total=self._total)

    def __enter__(self) -> Self:
        """Start the live line."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live line."""
        if self._bar is not None:
            self._bar.stop()

    def begin(self, asked: Asked) -> None:
        """Report the start of a run and the end of the previous one."""
        now_s = time.monotonic()
        if self._running is not None:
            before, began_s = self._running
            if not engine_kind(before.loaded.recipe).trains:
                self._simulated.append(now_s - began_s)
        self._running = (asked, now_s)
        taken = [key for key, each in self._left.items() if each is asked]
        left = guess(self._left, (sum(self._simulated) + _WEIGHT * SIMULATION_S) / (len(self._simulated) + _WEIGHT))
        for key in taken:
            del self._left[key]
        done = self._total - len(self._left) - 1
        text = printable(f"{asked.row}: {asked.run}{f', {asked.column}' if asked.column else ''}")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=f"{text}  {left} left")
        elif now_s >= self._next_line_s:
            self._next_line_s = now_s + _EVERY_S
            self._console.print(Text(f"{done + 1} of {self._total}  {text}  {left} left"), soft_wrap=True)
