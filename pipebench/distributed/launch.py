"""The launcher: starts the workers of a distributed run on this host, restarts and stops them, reports failures once.

It has no model and doesn't train, so it can be interrupted at any time.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.distributed import launch_child
from pipebench.distributed.control import STOP_KEY
from pipebench.distributed.launch_failure import FAILURE, Failure, read, report, root_cause, sentence
from pipebench.distributed.launch_join import ATTEMPT, RUN, STORE, prefix
from pipebench.distributed.launch_template import SilentTemplateError
from pipebench.distributed.private_store import PrivateStore, StoreServer
from pipebench.engine.admission import STOPPING, handling_signals
from pipebench.errors import printable_lines
from pipebench.model.cores import usable_cores
from pipebench.model.heap import HEAP

INTERRUPTED = 130  # exit code
GRACE_S = 30.0  # between SIGTERM and SIGKILL, as Slurm has
_POLL_S = 0.02
_KILLING_S = 10.0  # for workers to end on SIGKILL
# The signal that ends the other workers after one has failed. SIGTERM would ask them to stop at a drain. SIGKILL would
# be confused with that of a worker for which memory ran out at the same moment.
_CLOSING = signal.SIGUSR2
_CLOSING_S = 5.0  # a worker that has not ended by then is stuck or suspended, and gets SIGKILL
_NOTHING: Mapping[str, int] = {}


class Process(Protocol):
    """A worker process; `returncode` is None while it runs, and negative for a signal."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Set and return `returncode`."""


# Starts a worker, given additional environment variables and the file descriptors that it inherits. The latter are by
# name: an environment variable of this name gets the descriptor's number.
Start = Callable[[Mapping[str, str], Mapping[str, int]], Process]


def spawned(command: Sequence[str]) -> Start:
    """Return a function that starts a worker as a new process that runs a command."""
    words = [sys.executable, "-I", "-S", launch_child.__file__, str(os.getpid()), *command]

    def start(settings: Mapping[str, str], passed: Mapping[str, int]) -> Process:
        variables = {name: str(descriptor) for name, descriptor in passed.items()}
        # Every worker leads a process group, which includes its loader's processes.
        return subprocess.Popen(
            words, env={**os.environ, **settings, **variables}, start_new_session=True, pass_fds=tuple(passed.values())
        )

    return start


class Attempt:
    """One start of all workers."""

    def __init__(self, num_workers: int, index: int) -> None:
        """Prepare to start `num_workers` workers, all on this host; `index` is 0 for the first start of a run."""
        self._num_workers, self._index = num_workers, index
        self._server = StoreServer()
        self.store = PrivateStore(self._server.connect())
        self._keys = PrefixStore(prefix(index), self.store)
        # By rank, for records of failures. They have no names, so nothing remains of them if this process is killed.
        self._failures = [tempfile.TemporaryFile() for _ in range(num_workers)]  # noqa: SIM115 # close() does
        self._processes: list[Process] = []  # by rank
        self._signals: list[set[int]] = [set() for _ in range(num_workers)]  # sent to each worker, by rank
        self._first_failure_s: float | None = None

    def start(self, start: Start, settings: Mapping[str, str], passed: Mapping[str, int]) -> None:
        """Start the workers by `start`, with additional environment variables and inherited file descriptors."""
        common = {
            **settings,
            ATTEMPT: str(self._index),
            "WORLD_SIZE": str(self._num_workers),
            "LOCAL_WORLD_SIZE": str(self._num_workers),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torchrun's way to say that the launcher serves the store
        }
        for rank, failure in enumerate(self._failures):
            with self._server.connect() as connection:
                descriptors = {STORE: connection.fileno(), FAILURE: failure.fileno(), **passed}
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(start(common | own, descriptors))

    def wait(self, timeout_s: float) -> bool:
        """Wait for the workers for up to `timeout_s` seconds; return whether all have ended."""
        until_s = time.monotonic() + timeout_s
        while None in [process.poll() for process in self._processes]:
            self._end_after_failure()
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def request_stop(self, reason: str) -> None:
        """Ask the workers to stop at the next drain they can agree on."""
        self._keys.set(STOP_KEY, reason)

    def kill(self) -> None:
        """Send SIGKILL to all workers."""
        self._send(signal.SIGKILL)

    @property
    def started(self) -> bool:
        """Whether training had begun on every worker."""
        return bool(self._keys.check([f"started/{rank}" for rank in range(len(self._processes))]))

    def failures(self) -> list[Failure]:
        """Return the workers' failures, once all have ended."""
        found = []
        for rank, process in enumerate(self._processes):
            if process.returncode:
                failure = read(rank, process.returncode, self._failures[rank])
                is_ours = failure.kind == "killed" and -process.returncode in self._signals[rank]
                found.append(replace(failure, kind="closed") if is_ours else failure)
        return found

    def close(self) -> None:
        """Remove the attempt's files and close this process's connection to its store."""
        self.store.close()
        for file in self._failures:
            file.close()

    def _end_after_failure(self) -> None:
        """Once a worker has failed, end the others: by `_CLOSING`, and after `_CLOSING_S` by SIGKILL."""
        if self._first_failure_s is None:
            if any(process.returncode for process in self._processes):
                self._first_failure_s = time.monotonic()
                self._send(_CLOSING)
        elif time.monotonic() - self._first_failure_s > _CLOSING_S:
            self.kill()

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the process groups of all workers that are running."""
        for process, sent in zip(self._processes, self._signals, strict=False):  # not all may have been started
            if process.poll() is None:
                sent.add(number)
                # It may have ended since. macOS refuses a signal to such a process with PermissionError.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)


def run_workers(
    start: Start,
    num_workers: int,
    run: Path,
    *,
    max_restarts: int,
    grace_s: float = GRACE_S,
    say: Callable[[str], None] | None = None,
    verbose: bool = False,
    passed: Mapping[str, int] = _NOTHING,
) -> int:
    """Start the workers of a run on this host and wait for them, restarting all when one dies; return the exit code.

    It is 0 when all finished, 2 after a user's mistake, 3 after a failure and 130 after signals (see `_Signals`).

    Args:
        start: starts one worker, which has RANK, WORLD_SIZE and torchrun's other variables in its environment.
        num_workers: at least 1.
        run: the run's folder, in the workers' environment as PIPEBENCH_RUN.
        max_restarts: how often all workers are restarted.
        grace_s: seconds from SIGTERM to the end of workers that have not stopped.
        say: prints a message, by default to standard error.
        verbose: whether a report on the user's own code has its traceback.
        passed: file descriptors that workers inherit, by the environment variable that gets their number.
    """
    say, signals = say or _say, _Signals(grace_s)
    with handling_signals(signals.hear):
        for index in range(max_restarts + 1):
            settings = {RUN: str(run), **worker_settings(num_workers)}
            ended = _run_attempt(Attempt(num_workers, index), start, settings, passed, signals, say)
            if ended is None:
                return INTERRUPTED
            cause, started = ended
            if cause is None:
                return 0
            if signals.arrived or index == max_restarts or not worth_restart(cause, started):
                say(report(cause, _when(index, started), verbose=verbose))
                return cause.exit_code
            say(f"pipebench: {printable_lines(sentence(cause))[0]}; restart {index + 1} of {max_restarts}")
    raise AssertionError("a run ends in its last attempt")


def _run_attempt(
    attempt: Attempt,
    start: Start,
    settings: Mapping[str, str],
    passed: Mapping[str, int],
    signals: "_Signals",
    say: Callable[[str], None],
) -> tuple[Failure | None, bool] | None:
    """Start all workers and wait for them.

    Returns:
        The cause of a failure, if any, and whether training had begun; None if a signal ended the workers.
    """
    try:
        attempt.start(start, settings, passed)
        if not _wait_for_end(attempt, signals, say):
            return None
        failures = attempt.failures()
        return root_cause(failures) if failures else None, attempt.started
    except SilentTemplateError as error:
        return Failure(0, "silent", str(error)), True
    finally:
        attempt.close()


def worker_settings(num_workers: int) -> dict[str, str]:
    """Return environment variables of workers that share this host, except those that the user has set."""
    settings = {
        # torch's C++ side prints pages about every connection left behind by a dead worker.
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        # End a worker whose NCCL operation failed, as torchrun does.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # By default every worker would use all cores.
        "OMP_NUM_THREADS": str(max(1, int(usable_cores() / num_workers))),
        **HEAP,
    }
    return {name: value for name, value in settings.items() if name not in os.environ}


class _Signals:
    """Turns signals to this process into a time at which to end the workers.

    Ctrl-C requests a stop at the next drain. A second one, or the first before training began, ends the workers.
    SIGTERM and SIGHUP request a stop, and end the workers `grace_s` seconds later. Python handles signals in the main
    thread only.
    """

    def __init__(self, grace_s: float) -> None:
        self.arrived = False
        self.deadline_s = math.inf  # on the clock `time.monotonic`
        self._grace_s = grace_s

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Set the deadline, or advance it; a signal handler."""
        # Ctrl-C ends the workers at the second time only.
        patience_s = 0.0 if self.arrived else math.inf
        if number != signal.SIGINT:
            patience_s = self._grace_s
        self.deadline_s = min(self.deadline_s, time.monotonic() + patience_s)
        self.arrived = True


def _wait_for_end(attempt: Attempt, signals: _Signals, say: Callable[[str], None]) -> bool:
    """Wait for the workers and forward stop requests; False if a signal ended the workers.

    Before training has begun there is nothing to finish, so the first signal ends the workers.
    """
    has_requested = False
    while not attempt.wait(_POLL_S):
        if signals.arrived and not has_requested:
            if not attempt.started:
                _end(attempt, say, "before training began")
                return False
            has_requested = True
            attempt.request_stop("interrupted")
            say(STOPPING)
        if time.monotonic() > signals.deadline_s:
            _end(attempt, say, "before the next drain")
            return False
    return True


def _end(attempt: Attempt, say: Callable[[str], None], when: str) -> None:
    """End the workers now and say so."""
    attempt.kill()
    attempt.wait(_KILLING_S)
    say(f"pipebench: ended {when}")


def worth_restart(cause: Failure, started: bool) -> bool:
    """Return whether to restart the workers after a failure; `started` is whether training had begun.

    Not after mistakes or stalls, which would repeat. A failure before training began would repeat, too, unless it came
    from outside: SIGKILL and SIGTERM are no evidence against the program.
    """
    if cause.kind in ("user", "memory", "stalled", "silent", "interrupted"):
        return False
    return started or cause.message in ("ended by SIGKILL", "ended by SIGTERM")


def _when(num_restarts: int, started: bool) -> str:
    restarts = f"after {num_restarts} restart{'s' if num_restarts > 1 else ''}" if num_restarts else ""
    return ", ".join(part for part in ("" if started else "before training began", restarts) if part)


def _say(text: str) -> None:
    # The terminal may be gone.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
