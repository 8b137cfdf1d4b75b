"""One attempt at running all workers of a run on this host: a process each, over the loopback interface.

An attempt has a store of its own: what the dead have written to theirs is nothing to those who come after them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.distributed import launch_child
from pipebench.distributed.launch_failure import ERROR_FILE, Failure, read
from pipebench.distributed.launch_join import ATTEMPT, prefix, serve

LOOPBACK = "127.0.0.1"
STOP_KEY = "pipebench/stop"
_POLL_S = 0.02
# After one worker failed the others end by themselves or on SIGTERM; what doesn't is stuck or stopped.
_CLOSING_S = 5.0


class Attempt:
    """All workers, once: started when made, watched until they have ended."""

    def __init__(self, command: Sequence[str], num_workers: int, number: int, settings: Mapping[str, str]) -> None:
        """Start the workers.

        Args:
            command: program and arguments of every worker.
            num_workers: on this host, which is all of them.
            number: 0, then 1 for the first restart, ...
            settings: environment variables of the workers, beside those that tell each its place.

        Raises:
            UserError: the store can't be served.
        """
        self.store = serve(LOOPBACK)
        self._keys = PrefixStore(prefix(number), self.store)
        self._folder = Path(tempfile.mkdtemp(prefix="pipebench-"))
        self._sent: list[set[int]] = [set() for _ in range(num_workers)]  # signals, by rank
        self._first_dead_s: float | None = None
        everyone = {
            **os.environ,
            **settings,
            ATTEMPT: str(number),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.store.port),
            "WORLD_SIZE": str(num_workers),
            "LOCAL_WORLD_SIZE": str(num_workers),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # as torchrun says it: the store is here
        }
        words = [sys.executable, "-I", "-S", launch_child.__file__, str(os.getpid()), *command]
        self._processes = []
        for rank in range(num_workers):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(self._error_file(rank))}
            # Every worker leads a process group, which its loader's processes are in.
            self._processes.append(subprocess.Popen(words, env=everyone | own, start_new_session=True))

    def wait(self, timeout_s: float) -> bool:
        """Wait for the workers up to `timeout_s` seconds and say whether all have ended; keeps watch meanwhile."""
        until_s = time.monotonic() + timeout_s
        while None in [process.poll() for process in self._processes]:
            self._watch()
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
        """Say whether training had begun on every worker."""
        return bool(self._keys.check([f"started/{rank}" for rank in range(len(self._processes))]))

    def failures(self) -> list[Failure]:
        """Return how workers failed, once all have ended; empty if none did."""
        found = []
        for rank, process in enumerate(self._processes):
            if process.returncode:
                failure = read(rank, process.returncode, self._error_file(rank))
                closed = failure.kind == "killed" and -process.returncode in self._sent[rank]
                found.append(replace(failure, kind="closed") if closed else failure)
        return found

    def close(self) -> None:
        """Remove what the attempt wrote; its store ends with the object."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        """Ask the others to end once one has failed, and end what is left some time after that."""
        if self._first_dead_s is None:
            if any(process.returncode for process in self._processes):
                self._first_dead_s = time.monotonic()
                self._end(signal.SIGTERM)
        elif time.monotonic() - self._first_dead_s > _CLOSING_S:
            self.kill()

    def _end(self, number: signal.Signals) -> None:
        """Send a signal to all workers that haven't ended."""
        for sent, process in zip(self._sent, self._processes, strict=True):
            if process.poll() is None:
                sent.add(number)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"error-{rank}.json"
