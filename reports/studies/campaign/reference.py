"""Undisturbed runs, whose final checkpoints disturbed runs are compared with; one process trains all of them.

Stopping a run between two drains adds a drain, which changes the final bits of a run without flushes. So a reference
has additional drains where the disturbed run was stopped. `python -m reports.studies.campaign.reference` reads a line
of JSON per reference from standard input, trains it, and prints a line.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipebench.checkpoint.store import Checkpoints
from pipebench.cli.references import load_all
from pipebench.extensions.asynchronous.pushes import FILE_NAME, to_text
from pipebench.model.device import torch_settings
from pipebench.run.deciding import prepare_job
from pipebench.show.progress import Silent
from pipebench.train.checkpointing import CheckpointPolicy
from pipebench.train.engines import on_virtual_clock
from pipebench.train.loop import TrainingLoop
from pipebench.train.periods import Periods


@dataclass(frozen=True)
class MorePeriods(Periods):
    """The periods of a run with additional drains."""

    stops: tuple[int, ...] = ()  # minibatches after which the additional drains come

    def next_drain(self, done: int) -> int:
        """Return the number of minibatches after which the next drain comes."""
        return min([super().next_drain(done), *(stop for stop in self.stops if stop > done)])


def train(recipe: Path, words: Sequence[str], stops: Sequence[int], folder: Path) -> None:
    """Train a case undisturbed in the virtual engine.

    Args:
        recipe: its file.
        words: overrides.
        stops: minibatches after which additional drains come.
        folder: for the checkpoints, and the order of asynchronous pushes.
    """
    (loaded,) = load_all([str(recipe)], words)
    with torch_settings(loaded.recipe.engine):
        job = prepare_job(loaded, silent=True)
        policy = CheckpointPolicy(Checkpoints(folder))
        loop = TrainingLoop(job, on_virtual_clock(job), Silent(), lambda point: None, policy)
        periods = {each.name: getattr(loop._periods, each.name) for each in fields(Periods)}
        loop._periods = MorePeriods(**periods, stops=tuple(sorted(stops)))
        result, _ = loop.run()
    if result.pushes:
        (folder / FILE_NAME).write_text(to_text(result.pushes))


class References:
    """Trains references, each once, in a separate process; thread-safe.

    Args:
        folder: for the checkpoints; it must not exist.
        recipe: the recipe's file.
        settings: environment variables of the process.
    """

    def __init__(self, folder: Path, recipe: Path, settings: dict[str, str]) -> None:
        self._folder, self._recipe = folder, recipe
        self._lock = threading.Lock()
        self._known: dict[str, Path] = {}
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "reports.studies.campaign.reference"]
        self._process = subprocess.Popen(
            command, cwd=folder, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "References":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()

    def of(self, words: Sequence[str], stops: Sequence[int] = ()) -> Path:
        """Return the folder with the checkpoints of an undisturbed run; see `train` for the arguments.

        Raises:
            RuntimeError: training it failed.
        """
        key = json.dumps([list(words), sorted(stops)])
        with self._lock:
            if key not in self._known:
                folder = self._folder / str(len(self._known))
                folder.mkdir(exist_ok=True)
                self._ask({"recipe": str(self._recipe), "words": list(words), "stops": list(stops), "out": str(folder)})
                self._known[key] = folder
            return self._known[key]

    def _ask(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer != "done\n":
            raise RuntimeError(f"no reference for {' '.join(question['words'])}: {answer}")


def main() -> None:
    """Train references until standard input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            train(Path(asked["recipe"]), asked["words"], asked["stops"], Path(asked["out"]))
        except Exception as error:  # whatever it is, other references can still be trained
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            print("done", flush=True)


if __name__ == "__main__":
    main()
