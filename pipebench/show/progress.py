"""Progress of a run: a live line on a terminal; elsewhere plain lines, at the start, at evaluations, and in between.

Plain lines between evaluations become rarer with time, so that a short run shows progress soon and the log of a long
run stays short.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from pipebench.errors import printable
from pipebench.formats import measure, num_epochs, number, percent, seconds
from pipebench.show.terminal import standard_error
from pipebench.train.result import Point

_REDRAW_EVERY_S = 0.1
_BAR_CELLS = 20
_SHORT_S = 2.0  # work that takes less shows no progress
# Plain lines are half the run's age apart, within these bounds: a dozen in the first twenty minutes, then six an hour.
_SOONEST_S, _LATEST_S = 10.0, 600.0


class Silent:
    """Ignores progress: for reports, and for all processes but the first."""

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        """Ignore a minibatch."""

    def evaluation(self, point: Point, epoch: float) -> None:
        """Ignore an evaluation."""

    def note(self, text: str) -> None:
        """Ignore a note."""


class ProgressEvents:
    """Reports progress as plain data, to a function.

    `tell` gets a mapping per evaluation and note, and one per second on the last minibatch; its key `event` is
    `evaluation`, `note` or `progress`.
    """

    def __init__(self, name: str, tell: Callable[[dict[str, Any]], None]) -> None:
        self._name, self._tell, self._due_s = name, tell, 0.0

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        """Report a minibatch, if the last one was a second ago."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + 1.0
            self._say("progress", samples=samples, clock_s=clock_s, loss=loss, busy=occupancy)

    def evaluation(self, point: Point, epoch: float) -> None:
        """Report an evaluation."""
        self._say("evaluation", epoch=epoch, samples=point.samples, clock_s=point.clock_s, metrics=dict(point.metrics))

    def note(self, text: str) -> None:
        """Report a note."""
        self._say("note", text=text)

    def _say(self, event: str, **facts: Any) -> None:
        self._tell({"event": event, "name": self._name, **facts})


class RunProgress:
    """Shows a run's progress, as a context manager around the run.

    `update` may be called for every minibatch: it costs well below a microsecond unless a redraw is due.
    """

    def __init__(
        self,
        name: str,
        total_samples: int,
        quiet: bool,
        *,
        samples_per_epoch: int,
        clock: str = "virtual",
        console: Console | None = None,
    ) -> None:
        """Prepare, without writing anything.

        Args:
            name: the run's, at the beginning of each line.
            total_samples: training samples until the last epoch ends.
            quiet: write plain lines only.
            samples_per_epoch: training samples of an epoch.
            clock: the run's, `virtual` or `wall`.
            console: by default that of standard output.
        """
        self._name, self._clock, self._total_samples = name, clock, total_samples
        self._samples_per_epoch = samples_per_epoch
        self._console = console or Console(highlight=False)
        self._bars = _bars(name, total_samples)
        live = Live(Group(*self._bars), console=self._console, auto_refresh=False, transient=True)
        self._live = None if quiet else live
        self._scores = ""
        self._started_s = time.monotonic()
        self._next_redraw_s = self._next_plain_s() if quiet else 0.0

    def __enter__(self) -> Self:
        """Start the live line, or print that training begins."""
        self._started_s = time.monotonic()
        if self._live is not None:
            self._live.start()
        else:
            self._say(f"{self._name}  training, at most {num_epochs(self._total_samples / self._samples_per_epoch)}")
            self._next_redraw_s = self._next_plain_s()
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        """Show a minibatch.

        Args:
            samples: seen so far.
            clock_s: seconds on the run's clock.
            loss: of the minibatch.
            occupancy: share of the time in which workers compute, from 0 to 1.
        """
        now_s = time.monotonic()
        if now_s < self._next_redraw_s:
            return
        if self._live is not None:
            self._next_redraw_s = now_s + _REDRAW_EVERY_S
            facts: dict[str, Any] = {
                "position": self._position(samples),
                "loss": measure("loss", loss),
                "scores": self._scores,
                "clock": f"{self._clock} time {seconds(clock_s)}",
                "busy": percent(occupancy),
            }
            for bar in self._bars:
                bar.update(bar.task_ids[0], completed=samples, **facts)
            self._live.refresh()
        else:
            self._next_redraw_s = self._next_plain_s()
            position, clock = self._position(samples), self._clocks(clock_s)
            self._say(f"{self._name}  {position}  loss {measure('loss', loss)}  {clock}")

    def evaluation(self, point: Point, epoch: float) -> None:
        """Print an evaluation; `epoch` counts epochs trained so far."""
        texts = {name: f"{name} {measure(name, value)}" for name, value in point.metrics.items()}
        self._scores = "  ".join(text for name, text in texts.items() if "loss" not in name)
        self._say(f"{self._name}  epoch {epoch:g}  {'  '.join(texts.values())}  {self._clocks(point.clock_s)}")
        if self._live is None:
            self._next_redraw_s = self._next_plain_s()

    def note(self, text: str) -> None:
        """Print a note."""
        self._say(f"{self._name}  {text}")

    def _say(self, text: str) -> None:
        """Print a line. In a run of several processes a closed pipe, for which rich raises SystemExit, is ignored."""
        with contextlib.suppress(OSError, SystemExit) if self._clock == "wall" else contextlib.nullcontext():
            self._console.print(Text(printable(text)), soft_wrap=True)

    def _next_plain_s(self) -> float:
        now_s = time.monotonic()
        return now_s + min(_LATEST_S, max(_SOONEST_S, (now_s - self._started_s) / 2))

    def _clocks(self, clock_s: float) -> str:
        text = f"{self._clock} time {seconds(clock_s)}"
        if self._clock == "wall":
            return text
        elapsed_s = time.monotonic() - self._started_s
        return f"{text}  wall {f'{elapsed_s:.1f} s' if elapsed_s < 60 else seconds(elapsed_s)}"

    def _position(self, samples: int) -> str:
        epochs, total = samples / self._samples_per_epoch, self._total_samples / self._samples_per_epoch
        return f"epoch {epochs:.1f} of at most {total:g}"


@contextmanager
def preparing(
    name: str, console: Console | None = None, *, prints_lines: bool = False, work: str = "preparing"
) -> Iterator[Callable[[str], None]]:
    """Show which work a command does before its output; yields a function that replaces the description of the work.

    On a terminal the description is a live line. Otherwise plain lines go to the standard error once the work takes
    long.

    Args:
        name: of the run, at the beginning of each line.
        console: by default that of standard output.
        prints_lines: if `console` is no terminal, write plain lines there, the first at once.
        work: the first description.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        if prints_lines:
            console.print(Text(f"{name}  {work}"), soft_wrap=True)
        with lasting(name, "" if prints_lines else work, console if prints_lines else None) as say:
            yield say
        return
    with console.status(Text(f"{name}: {work}")) as status:
        yield lambda work: status.update(Text(f"{name}: {work}"))


@contextmanager
def lasting(
    name: str, work: str, console: Console | None = None, *, shown: bool = True
) -> Iterator[Callable[[str], None]]:
    """Print which work a command does once it has lasted 2 s; yields a function that replaces the description.

    Later lines, with other descriptions, are at least ten seconds apart.

    Args:
        name: of the run, at the beginning of each line.
        work: the first description; "" to print nothing before the first replacement.
        console: by default that of standard error.
        shown: False to print nothing.
    """
    latest, lock, due_s = work, Lock(), math.inf

    def show() -> None:
        nonlocal due_s
        with lock:
            if not latest:
                due_s = 0.0
                return
            due_s = time.monotonic() + _SOONEST_S
            (console or standard_error()).print(Text(printable(f"{name}  {latest}")), soft_wrap=True)

    def say(work: str) -> None:
        nonlocal latest
        latest = work
        if time.monotonic() >= due_s:
            show()

    timer = Timer(_SHORT_S, show)
    timer.daemon = True
    if shown:
        timer.start()
    try:
        yield say
    finally:
        timer.cancel()


class _Speed(TextColumn):
    """Samples per second on the wall clock, once known."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{number(task.speed)} samples/s")


def _bars(name: str, total_samples: int) -> tuple[Progress, Progress]:
    """Return the live display of a run: a line of its learning, and one of its speed."""
    learnt = Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(_BAR_CELLS),
        TextColumn("{task.fields[position]}"),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[scores]}", style="cyan", markup=False),
    )
    speed = Progress(
        TextColumn(" {task.fields[clock]}"),
        TextColumn("{task.fields[busy]} busy"),
        _Speed(),
        TextColumn("wall"),
        TimeElapsedColumn(),
        TextColumn("+ at most"),
        TimeRemainingColumn(),
    )
    nothing: dict[str, Any] = {"position": "", "loss": "", "scores": "", "clock": "", "busy": ""}
    for bar in (learnt, speed):
        bar.add_task(name, total=total_samples or None, **nothing)
    return learnt, speed
