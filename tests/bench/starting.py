"""`nox -s bench`: how long commands take that train nothing, in fresh processes, beside what Python and torch take.

One round is a process per row, so that a machine that turns slower does so for all rows alike. Files are in the page
cache, and profiles in a cache of the bench's own: the first round, which isn't counted, makes them.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROUNDS = 7
FLOORS = {"python -c pass": ["-c", "pass"], "python -c 'import torch'": ["-c", "import torch"]}
# What a command may take, in seconds; None where nothing is promised.
COMMANDS: Mapping[str, float | None] = {
    "--help": 0.3, "ls": 1.0, "show quickstart": 1.0, "plan quickstart": 1.5, "draw quickstart": None,
}  # fmt: skip


def starting_table() -> Table:
    """Measure every command and the floors, and return a table of medians, ranges and targets."""
    rows = {**FLOORS, **{f"pipebench {words}": ["-m", "pipebench", *words.split()] for words in COMMANDS}}
    taken = _rounds(rows)
    targets = {f"pipebench {words}": target_s for words, target_s in COMMANDS.items()}
    heading = f"start to end of a command, {ROUNDS} fresh processes"
    table = Table(heading, "seconds (median)", "range", "target", "verdict")
    for name, values in taken.items():
        median, target_s = statistics.median(values), targets.get(name)
        told = ("-", "-") if target_s is None else (f"< {target_s:g}", "met" if median < target_s else "missed")
        table.add_row(name, f"{median:.2f}", f"{min(values):.2f} to {max(values):.2f}", *told)
    return table


def _rounds(rows: Mapping[str, Sequence[str]]) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PIPEBENCH_CACHE": folder, "PYTHONPATH": path}
        for counts in (False, *[True] * ROUNDS):
            for name, arguments in rows.items():
                started = time.perf_counter()
                subprocess.run(
                    [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, check=True
                )
                if counts:
                    taken[name].append(time.perf_counter() - started)
    return taken


if __name__ == "__main__":
    Console(width=140).print(starting_table())
