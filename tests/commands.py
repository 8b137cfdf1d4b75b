"""Runs the command line in processes that are forked from one that has imported its modules, so that they start fast.

Importing takes five CPU seconds in each new process. Tests in which the start itself matters run `python -m pipebench`.
"""

import atexit
import io
import os
import signal
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch

from pipebench.run.export import export
from reports.studies.watched_run import WatchedRun
from tests import shortcuts
from tests.patience import PATIENCE_S
from tests.processes import IMPORTED

NOTHING: Mapping[str, str] = MappingProxyType({})


def _command_line(change: Callable[[], object] | None = None) -> None:
    from pipebench.__main__ import main
    from pipebench.cli import run

    run._has_computed_nothing = lambda: True  # although torch is imported
    if change is not None:
        change()
    main()


class CopiedCommand:
    """A command that runs in a forked process, with methods like those of `subprocess.Popen`.

    Args:
        words: arguments of `pipebench`.
        folder: working directory.
        out: file that standard output is appended to.
        errors: file that standard error is appended to.
        settings: environment variables, in addition to those of this process.
        main: called instead of the command line; `words` are in `sys.argv`.
        without: names of environment variables that are removed.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        out: Path,
        errors: Path,
        settings: Mapping[str, str] = NOTHING,
        main: Callable[[], object] = _command_line,
        without: Container[str] = (),
    ) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        base = {**os.environ, "OMP_NUM_THREADS": "1"}
        base.pop("MLFLOW_TRACKING_URI", None)  # records go to the folder
        environment = {name: value for name, value in base.items() if name not in without} | {**settings}
        args = ([*words], str(folder), str(out), str(errors), environment, shortcuts.TABLES, main)
        self._process = context.Process(target=_run, args=args)
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        self._process.join(PATIENCE_S)
        code = self.poll()
        assert code is not None, "the command goes on and on"
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class CopiedRun(WatchedRun):
    """A watched run whose command is a `CopiedCommand`."""

    def start(self, words: Sequence[str], settings: Mapping[str, str], output: Path) -> Any:
        return CopiedCommand(["run", *words], self.folder, output, output, settings)


class Done(NamedTuple):
    """The exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def run_copy(
    words: Sequence[str],
    folder: Path,
    settings: Mapping[str, str] = NOTHING,
    change: Callable[[], object] | None = None,
) -> Done:
    """Run a command to its end; `change`, a function of a module, may change the process before."""
    return _run_to_its_end(words, folder, settings, partial(_command_line, change))


def run_code(code: str, folder: Path, *words: str, settings: Mapping[str, str] = NOTHING) -> Done:
    """Run Python to its end; `words` are in `sys.argv`."""
    return _run_to_its_end(words, folder, settings, partial(exec, code, {"__name__": "__main__"}))


def _run_to_its_end(
    words: Sequence[str], folder: Path, settings: Mapping[str, str], main: Callable[[], object]
) -> Done:
    with TemporaryDirectory() as said:
        out, errors = (Path(said, name) for name in ("out", "errors"))
        with CopiedCommand(words, folder, out, errors, settings, main) as process:
            code = process.wait()
        return Done(code, out.read_text(), errors.read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the only run in a folder, from `pipebench export`."""
    (run,) = folder.glob("pipebench-runs/*")
    export(str(run), str(folder / "weights.pt"), None)
    return torch.load(folder / "weights.pt", weights_only=True)


def _run(
    words: Sequence[str],
    folder: str,
    out: str,
    errors: str,
    environment: Mapping[str, str],
    tables: Path,
    main: Callable[[], object],
) -> None:
    """Run the command in the forked process, in a new session whose terminal is `out` if that is a terminal."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, path in ((0, os.devnull), (1, out), (2, errors)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    for stream in (sys.__stdout__, sys.__stderr__):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(write_through=True)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv[:] = ["pipebench", *words]
    shortcuts.take(setattr, tables)
    try:
        main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing doesn't call them
