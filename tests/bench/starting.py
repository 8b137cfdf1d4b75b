"""`nox -s bench`: the seconds of commands that don't train, in new processes, beside those of Python and torch.

Files are in the page cache and profiles in a cache of the bench's own, both after a first round of warm-up.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.pairs import median_and_range, rounds

ROUNDS = 7
FLOORS = {"python -c pass": ["-c", "pass"], "python -c 'import torch'": ["-c", "import torch"]}
# Target [s] of every command; None for no target.
COMMANDS: Mapping[str, float | None] = {
    "--help": 0.3, "ls": 1.0, "show quickstart": 1.0, "plan quickstart": 1.5, "draw quickstart": None,
}  # fmt: skip


def starting_table() -> Table:
    """Measure all commands and the floors; return a table of medians, ranges and targets."""
    rows = {**FLOORS, **{f"pipebench {words}": ["-m", "pipebench", *words.split()] for words in COMMANDS}}
    taken = _seconds(rows)
    targets = {f"pipebench {words}": target_s for words, target_s in COMMANDS.items()}
    heading = f"start to end of a command, {ROUNDS} fresh processes"
    table = Table(heading, "seconds (median)", "range", "target", "verdict")
    for name, values in taken.items():
        median, target_s = statistics.median(values), targets.get(name)
        verdict = ("-", "-") if target_s is None else (f"< {target_s:g}", "met" if median < target_s else "missed")
        table.add_row(name, *median_and_range(values, ".2f"), *verdict)
    return table


def _seconds(rows: Mapping[str, Sequence[str]]) -> dict[str, list[float]]:
    """Return the seconds of Python with some arguments, by name of the row, for every round."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PIPEBENCH_CACHE": folder, "PYTHONPATH": path}
        run = partial(subprocess.run, cwd=folder, env=environment, capture_output=True, check=True)
        return rounds({name: partial(run, [sys.executable, *arguments]) for name, arguments in rows.items()}, ROUNDS)


if __name__ == "__main__":
    Console(width=140).print(starting_table())
