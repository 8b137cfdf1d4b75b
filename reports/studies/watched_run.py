"""Observes and disturbs a `pipebench run` from outside: its output, processes, checkpoints and record in MLflow."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil  # type: ignore[import-untyped] # it has no types of its own

_POLL_S = 0.002
_OUTPUT = "output.txt"


class WatchedRun:
    """A run in a folder of its own, which has its `pipebench-runs/`, `mlflow.db` and `output.txt`.

    Leaving it as a context manager kills the command and its workers if they still run.
    """

    def __init__(self, folder: Path, words: Sequence[str], settings: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start `pipebench run`.

        Args:
            folder: of the run; the output of an earlier command there is kept.
            words: arguments of the command.
            settings: environment variables, in addition to those of this process.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._seen: set[int] = set()
        self._before = len(self.all_output())
        self.process = self.start(words, settings, folder / _OUTPUT)

    def start(self, words: Sequence[str], settings: Mapping[str, str], output: Path) -> Any:
        """Start the command and return its process: a `subprocess.Popen`, or in a subclass what has its methods."""
        with output.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "pipebench", "run", *words],
                cwd=self.folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **settings},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "WatchedRun":
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in (*self.workers().values(), self.process.pid):
            end(pid)
        self.process.wait()

    @property
    def run_folder(self) -> Path | None:
        """The run's folder; None before it is made."""
        found = next(iter(self.folder.glob("pipebench-runs/*/run.json")), None)
        return None if found is None else found.parent

    @property
    def output(self) -> str:
        """The output of this command so far, both streams."""
        return self.all_output()[self._before :]

    def all_output(self) -> str:
        """Return the output of all commands in this folder so far."""
        path = self.folder / _OUTPUT
        return path.read_text(errors="replace") if path.exists() else ""

    def workers(self, attempt: int | None = None) -> dict[int, int]:
        """Return the process ids of the living workers by rank; of `attempt` only, counted from 0, if given."""
        found: dict[int, int] = {}
        for child in _children(self.process.pid):
            for process in [child, *_children(child.pid)]:
                rank, its_attempt = _place(process)
                if rank is not None and attempt in (None, its_attempt):
                    found.setdefault(rank, process.pid)
                    self._seen.add(found[rank])
        return found

    def left_over(self) -> list[int]:
        """Return the process ids of the workers that `workers` has ever returned and that still live."""
        return [pid for pid in self._seen if lives(pid)]

    def steps(self, *, whole: bool = True) -> list[int]:
        """Return the steps of the checkpoints, ascending: of committed ones if `whole`, else of the others."""
        folders = [] if self.run_folder is None else self.run_folder.glob("checkpoints/step-*")
        return sorted(int(each.name[5:]) for each in folders if (each / "manifest.json").exists() == whole)

    def wait_until(self, happened: Callable[[], object], limit_s: float, what: str) -> bool:
        """Wait until `happened()` is true or the command ends; return whether it is true.

        Args:
            happened: the condition.
            limit_s: most seconds to wait.
            what: the condition in words, for the error.

        Raises:
            TimeoutError: neither happened within `limit_s` seconds.
        """
        until_s = time.monotonic() + limit_s
        while not happened():
            if self.process.poll() is not None:
                return bool(happened())
            if time.monotonic() > until_s:
                raise TimeoutError(f"{what}: not within {limit_s:g} s; output so far:\n{self.all_output()}")
            time.sleep(_POLL_S)
        return True

    def wait(self, limit_s: float) -> int:
        """Wait for the command's end and return its exit code.

        Raises:
            TimeoutError: it takes longer than `limit_s` seconds.
        """
        self.wait_until(lambda: False, limit_s, "the end of the command")
        code: int = self.process.wait()
        return code

    def signal(self, number: signal.Signals, pids: Iterable[int]) -> None:
        """Send a signal to processes that may have ended by now."""
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def recorded(folder: Path) -> dict[str, Any]:
    """Return the runs that MLflow has in a folder's store.

    Returns:
        `runs`: id, status and tags of each run; `metrics` of the first run: (step, value) in order of steps, by name.
    """
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = client.search_runs(experiments)
    metrics = {
        name: sorted((int(row.step), float(row.value)) for row in client.get_metric_history(runs[0].info.run_id, name))
        for name in (runs[0].data.metrics if runs else ())
    }
    about = [{"id": run.info.run_id, "status": run.info.status, "tags": dict(run.data.tags)} for run in runs]
    return {"runs": about, "metrics": metrics}


def end(pid: int) -> None:
    """Kill a process, if it lives."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _place(process: psutil.Process) -> tuple[int | None, int]:
    """Return a worker's rank and attempt; None and -1 for other processes.

    Workers that are forked from a template have both in their process's name, others in their environment.
    """
    try:
        if named := re.fullmatch(r"worker (\d+)\.(\d+)", process.name()):
            return int(named[1]), int(named[2])
        environ = process.environ()
    except psutil.Error:
        return None, -1
    return int(environ["RANK"]) if "RANK" in environ else None, int(environ.get("PIPEBENCH_ATTEMPT", -1))


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []


def lives(pid: int) -> bool:
    """Return whether a process exists and isn't a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
