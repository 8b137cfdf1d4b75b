"""Undisturbed runs, trained one after another by one process: what every disturbed run has to end with.

A run without a flush that was stopped between two of its drains ends with other bits, those of a run that has one more
drain there. So a reference is told where the disturbed run was stopped, and drains there, too, without being stopped.
`python -m reports.studies.campaign.reference` reads a line of JSON per reference, and answers with one.
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
    """A run's drains, and some more."""

    stops: tuple[int, ...] = ()  # after how many minibatches these are

    def next_drain(self, done: int) -> int:
        """Return after how many minibatches the next drain is."""
        return min([super().next_drain(done), *(stop for stop in self.stops if stop > done)])


def train(recipe: Path, words: Sequence[str], stops: Sequence[int], folder: Path) -> None:
    """Train a case undisturbed in the virtual engine; its checkpoints, and what was pushed when, are in a folder."""
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
    """Trains references, each once, in a process of its own; threads may share it.

    Args:
        folder: where they and the recipe are.
        settings: environment variables of that process.
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
        """Return the folder of checkpoints of an undisturbed run.

        Raises:
            RuntimeError: it can't be trained.
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
    """Answer until the standard input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            train(Path(asked["recipe"]), asked["words"], asked["stops"], Path(asked["out"]))
        except Exception as error:  # whatever it is, the other references are worth having
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            print("done", flush=True)


if __name__ == "__main__":
    main()
