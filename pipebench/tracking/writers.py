"""Writes a run's curves to TensorBoard or Weights & Biases, beside MLflow, if the recipe's `tracking` names them.

Each uses its own library and writes below the working directory. One that fails is left out after one warning, as
MLflow has the results.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipebench.errors import print_notice
from pipebench.tracking.entries import logged_metrics, values_of
from pipebench.tracking.record import LogEntry
from pipebench.train.result import Point, RunResult


class RunDescription(NamedTuple):
    """A run's names and params."""

    suite: str  # the MLflow experiment
    title: str  # the run's name in MLflow
    folder: str  # a name that no other run of the suite has
    params: Mapping[str, str]
    virtual: bool  # whether the run's clock is virtual
    samples_done: int = 0  # samples after which this process resumes the run; 0 at its beginning


class _Writer(Protocol):
    """A writer of one kind."""

    def values(self, values: Mapping[str, float], samples: int) -> None:
        """Write the values of one moment."""

    def finish(self, result: RunResult | None) -> None:
        """Write the result, None if there is none, and end."""


class _TensorBoard:
    """Event files in `tensorboard/SUITE/FOLDER`."""

    def __init__(self, run: RunDescription) -> None:
        folder = Path("tensorboard") / run.suite / re.sub(r"[^\w.+-]+", "-", run.folder)
        self._writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(
            str(folder), purge_step=run.samples_done + 1
        )
        self._params = dict(run.params)

    def values(self, values: Mapping[str, float], samples: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()  # at once, as a process that resumes the run writes later points only

    def finish(self, result: RunResult | None) -> None:
        if result is not None:
            self._writer.add_text("result", result.sentence)
            self._writer.add_hparams(self._params, logged_metrics(result), run_name=".")
        self._writer.close()


class _WeightsAndBiases:
    """A Weights & Biases run in the folder `wandb`; offline unless WANDB_MODE says otherwise."""

    def __init__(self, run: RunDescription) -> None:
        wandb: Any = import_module("wandb")
        self._run: Any = wandb.init(
            project=re.sub(r"[^\w.-]+", "-", run.suite),
            name=run.title,
            id=hashlib.sha256(f"{run.suite}/{run.folder}".encode()).hexdigest()[:16],
            resume="allow",
            config=dict(run.params),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def values(self, values: Mapping[str, float], samples: int) -> None:
        self._run.log(dict(values), step=samples)

    def finish(self, result: RunResult | None) -> None:
        if result is not None:
            self._run.summary.update({**logged_metrics(result), "outcome": result.outcome})
        self._run.finish(exit_code=0 if result is not None else 1)


_KINDS: dict[str, Callable[[RunDescription], _Writer]] = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}


class Writers:
    """A run's writers; no method raises because a writer fails."""

    def __init__(self, names: Iterable[str], run: RunDescription) -> None:
        """Begin with the writers among a recipe's `tracking`."""
        self._virtual = run.virtual
        self._writers: dict[str, _Writer] = {}
        for name in names:
            if name in _KINDS:
                self._try(name, lambda name=name: self._writers.update({name: _KINDS[name](run)}))  # type: ignore[misc]

    def point(self, point: Point) -> None:
        """Write one moment of the curves, at the samples seen."""
        if self._writers:
            values, samples = values_of(LogEntry(point=point), virtual=self._virtual)
            self._each(lambda writer: writer.values(values, samples))

    def finish(self, result: RunResult | None) -> None:
        """Write the run's result, if it has one, and end."""
        self._each(lambda writer: writer.finish(result))

    def _each(self, write: Callable[[_Writer], None]) -> None:
        for name, writer in list(self._writers.items()):
            self._try(name, lambda writer=writer: write(writer))  # type: ignore[misc]

    def _try(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # any exception of a library, the disk or the network
            self._writers.pop(name, None)
            why = " ".join(str(error).split())[:160]
            print_notice(f"{name} failed ({why}); MLflow has the run, which goes on")
