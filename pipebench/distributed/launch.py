"""Runs the workers of a distributed run on this host: starts, restarts and stops them, and reports failures once.

The parent process has no model and doesn't train, so it can always be interrupted.
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
from pipebench.distributed.private_store import PrivateStore, StoreServer
from pipebench.engine.admission import STOPPING, handling_signals
from pipebench.errors import printable_lines
from pipebench.model.cores import usable_cores
from pipebench.model.heap import HEAP

# As Slurm and docker have between SIGTERM and SIGKILL.
GRACE_S = 30.0
INTERRUPTED = 130
_POLL_S, _KILLING_S = 0.02, 10.0
# After a worker failed, the others end by themselves or on a signal within this time, or are stuck or suspended. Not on
# SIGTERM, which asks them for a stop at a drain; nor by SIGKILL at once, which one may be dying of for another reason.
_CLOSING_S, _CLOSING = 5.0, signal.SIGUSR2
_NOTHING: Mapping[str, int] = {}


class Process(Protocol):
    """A worker process; `returncode` is None while it runs, and negative for a signal."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Set and return `returncode`."""


# Starts a worker with environment variables, and file descriptors that it inherits by the variables that tell them.
Start = Callable[[Mapping[str, str], Mapping[str, int]], Process]


def spawned(command: Sequence[str]) -> Start:
    """Return what starts a worker as a new process that runs a command."""
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

    def __init__(
        self, start: Start, num_workers: int, number: int, settings: Mapping[str, str], passed: Mapping[str, int]
    ) -> None:
        """Start `num_workers` workers, all on this host, with additional environment variables.

        `number` is 0, then 1 for the first restart, ...; `passed` are file descriptors that they inherit, by the
        environment variable that tells them.
        """
        server = StoreServer()
        self.store = PrivateStore(server.connect())
        self._keys = PrefixStore(prefix(number), self.store)
        # Unnamed, so that nothing remains of them however this process ends.
        self._failures = [tempfile.TemporaryFile() for _ in range(num_workers)]  # noqa: SIM115 # close() does
        self._sent: list[set[int]] = [set() for _ in range(num_workers)]  # signals, by rank
        self._first_dead_s: float | None = None
        everyone = {
            **settings,
            ATTEMPT: str(number),
            "WORLD_SIZE": str(num_workers),
            "LOCAL_WORLD_SIZE": str(num_workers),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torchrun's way to say that the launcher serves the store
        }
        self._processes = []
        for rank in range(num_workers):
            with server.connect() as connection:
                given = {STORE: connection.fileno(), FAILURE: self._failures[rank].fileno(), **passed}
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(start(everyone | own, given))

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
        """End all workers now."""
        self._end(signal.SIGKILL)

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
                closed = failure.kind == "killed" and -process.returncode in self._sent[rank]
                found.append(replace(failure, kind="closed") if closed else failure)
        return found

    def close(self) -> None:
        """Remove the attempt's files, and close its store, which ends with the last worker's connection."""
        self.store.close()
        for file in self._failures:
            file.close()

    def _end_after_failure(self) -> None:
        """After one worker failed, end the others, later by SIGKILL."""
        if self._first_dead_s is None:
            if any(process.returncode for process in self._processes):
                self._first_dead_s = time.monotonic()
                self._end(_CLOSING)
        elif time.monotonic() - self._first_dead_s > _CLOSING_S:
            self.kill()

    def _end(self, number: signal.Signals) -> None:
        """Send a signal to all workers that are running."""
        for sent, process in zip(self._sent, self._processes, strict=True):
            if process.poll() is None:
                sent.add(number)
                # It has ended: on macOS it mustn't be sent any until somebody has waited for it.
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
    """Start the workers of a run on this host and wait for them, restarting all when one dies.

    Ctrl-C requests a stop at the next drain; a second one, or the first before training began, ends the workers.
    SIGTERM and SIGHUP do both, the second after `grace_s` seconds, in the main thread only.

    `start` starts a worker with RANK, WORLD_SIZE and the like in their environment, the folder `run` as
    PIPEBENCH_RUN, and what `passed` has. `say` prints messages, by default to standard error, `verbose` tracebacks too.

    Returns:
        0 when all finished; 2 for a user's mistake, 3 for a failure, 130 when ended by a second signal, all reported.
    """
    say, signals = say or _say, _Signals(grace_s)
    with handling_signals(signals.hear):
        for number in range(max_restarts + 1):
            attempt = Attempt(start, num_workers, number, {RUN: str(run), **worker_settings(num_workers)}, passed)
            try:
                if not _wait_for_end(attempt, signals, say):
                    return INTERRUPTED
                failures = attempt.failures()
                if not failures:
                    return 0
                cause, started = root_cause(failures), attempt.started
            finally:
                attempt.close()
            if signals.asked or number == max_restarts or not worth_restart(cause, started):
                say(report(cause, _when(number, started), verbose=verbose))
                return cause.exit_code
            say(f"pipebench: {printable_lines(sentence(cause))[0]}; restart {number + 1} of {max_restarts}")
    raise AssertionError("a run ends in its last attempt")


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
    """The deadline that signals to this process set."""

    def __init__(self, grace_s: float) -> None:
        self.asked = False  # whether a signal arrived
        self.deadline_s = math.inf  # by `time.monotonic`, to end the workers
        self._grace_s = grace_s

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Set or advance the deadline."""
        patience_s = math.inf if not self.asked else 0.0
        if number != signal.SIGINT:
            patience_s = self._grace_s
        self.deadline_s = min(self.deadline_s, time.monotonic() + patience_s)
        self.asked = True


def _wait_for_end(attempt: Attempt, signals: _Signals, say: Callable[[str], None]) -> bool:
    """Wait for the workers and forward stop requests; False if a signal ended them.

    Before training has begun there is nothing to finish, and the first signal ends them.
    """
    passed_on = False
    while not attempt.wait(_POLL_S):
        if signals.asked and not passed_on:
            if not attempt.started:
                return _ended(attempt, say, "before training began")
            passed_on = True
            attempt.request_stop("interrupted")
            say(STOPPING)
        if time.monotonic() > signals.deadline_s:
            return _ended(attempt, say, "before the next drain")
    return True


def _ended(attempt: Attempt, say: Callable[[str], None], when: str) -> bool:
    """End the workers now and say so; return False."""
    attempt.kill()
    attempt.wait(_KILLING_S)
    say(f"pipebench: ended {when}")
    return False


def worth_restart(cause: Failure, started: bool) -> bool:
    """Return whether to restart: not after mistakes or stalls, nor before training had `started` unless killed."""
    if cause.kind in ("user", "memory", "stalled", "silent", "interrupted"):
        return False
    # Ended from outside, at whatever moment: no evidence against the program.
    return started or cause.message in ("ended by SIGKILL", "ended by SIGTERM")


def _when(number: int, started: bool) -> str:
    restarts = f"after {number} restart{'s' if number > 1 else ''}" if number else ""
    return ", ".join(part for part in ("" if started else "before training began", restarts) if part)


def _say(text: str) -> None:
    # The terminal may be gone.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
