"""Past runs as a table: comparisons with their runs below them."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.text import Text

from pipebench.errors import printable
from pipebench.formats import UNKNOWN, number, seconds, shortened
from pipebench.show.tables import new_table, print_table
from pipebench.show.terminal import print_plain
from pipebench.tracking.results import PastRun, short_id

_NAME_WIDTH = 44


def print_past_runs(runs: Sequence[PastRun], word: str, most: int | None, console: Console) -> None:
    """Print past runs, comparisons with their runs below them.

    Args:
        runs: the newest first.
        word: print only runs and comparisons with this text in their name, their recipe's name, or that of a run below.
        most: runs and comparisons at the top level at most; None for all.
        console: where to print.
    """
    known = {run.ids[0] for run in runs}
    below: dict[str, list[PastRun]] = {}
    for run in reversed(runs):  # the runs of a comparison are listed in the order of their start
        if run.parent_id in known:
            below.setdefault(str(run.parent_id), []).append(run)
    tops = [run for run in runs if run.parent_id not in known and _has(run, word, below)]
    if not tops:
        print_plain(console, "no run is recorded" + (f" with {printable(word)!r} in its name" if word else ""))
        return
    table = new_table("id", "began", "run", "recipe", "outcome", "time to accuracy", "samples/s", left=5)

    def add(run: PastRun, depth: int) -> None:
        table.add_row(
            short_id(run.ids[0]),
            f"{datetime.fromtimestamp(run.began_ms / 1000):%Y-%m-%d %H:%M}",
            Text(shortened("  " * depth + run.names[0], _NAME_WIDTH), style="" if depth else "bold"),
            Text(shortened(run.recipe, _NAME_WIDTH)),
            Text(printable(run.outcome)),
            seconds(run.time_to_accuracy_s),
            UNKNOWN if run.throughput_samples_per_s is None else number(run.throughput_samples_per_s),
        )
        for child in below.get(run.ids[0], ()):
            add(child, depth + 1)

    for run in tops[:most]:
        add(run, 0)
    print_table(console, table, left=3)
    if most is not None and len(tops) > most:
        print_plain(console, Text(f"  {len(tops) - most:,} earlier ones are left out; --all lists them", style="dim"))


def _has(run: PastRun, word: str, below: dict[str, list[PastRun]]) -> bool:
    named = word in run.names[0] or word in run.recipe
    return named or any(_has(child, word, below) for child in below.get(run.ids[0], ()))
