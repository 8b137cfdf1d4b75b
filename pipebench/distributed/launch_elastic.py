"""One attempt at running all workers of this host under torch's elastic launcher, quiet and on the loopback interface.

torch restarts workers itself, but also those whose start fails the same way each time, and with the store of the dead:
here an attempt is one launch with a store of its own, and pipebench decides about the next.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch lists it nowhere
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipebench.distributed import launch_child
from pipebench.distributed.launch_failure import Failure, closed_apart, read
from pipebench.distributed.launch_join import ATTEMPT, prefix, serve

LOOPBACK = "127.0.0.1"
STOP_KEY = "pipebench/stop"
_BACKEND = "pipebench-loopback"
# After one worker failed the others end by themselves or on SIGTERM; what doesn't is stuck or stopped.
_CLOSING_S = 5.0


class _Loopback(RendezvousHandler):
    """The meeting of one launcher with itself: its store is the attempt's own."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._store = parameters.config["store"]
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("launcher", self._store), 0, 1, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class Attempt:
    """All workers, once: started when made, watched until they have ended."""

    def __init__(self, command: Sequence[str], num_workers: int, number: int, settings: Mapping[str, str]) -> None:
        """Start the workers.

        Args:
            command: program and arguments of every worker.
            num_workers: on this host, which is all of them.
            number: 0, then 1 for the first restart, ...
            settings: environment variables of the workers, beside the launcher's own.

        Raises:
            UserError: the store can't be served.
        """
        self.store = serve(LOOPBACK)
        self._keys = PrefixStore(prefix(number), self.store)
        self._folder = Path(tempfile.mkdtemp(prefix="pipebench-"))
        self._num_workers = num_workers
        self._found: dict[int, int] = {}
        self._by_us: set[int] = set()
        self._died_first: set[int] = set()
        self._first_dead_s: float | None = None
        self._outcome: BaseException | None = None
        settings = {**settings, ATTEMPT: str(number)}
        words = [
            *("-I", "-S", launch_child.__file__, str(os.getpid())),
            *(f"{name}={value}" for name, value in settings.items()),
            *("--", *command),
        ]
        # torch fills in ${local_rank}; a recipe's own dollars are to stay.
        arguments = [word.replace("$", "$$") for word in words]
        self._thread = threading.Thread(target=self._launch, args=(arguments,), daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the workers up to `timeout_s` seconds and say whether all have ended; keeps watch meanwhile."""
        self._watch()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def request_stop(self, reason: str) -> None:
        """Ask the workers to stop at the next drain they can agree on."""
        self._keys.set(STOP_KEY, reason)

    def kill(self) -> None:
        """End all workers now."""
        for rank, pid in self._pids().items():
            if _exit_code(pid) is None:
                self._by_us.add(rank)
                with contextlib.suppress(ProcessLookupError):
                    # Every worker leads a process group, which its loader's processes are in.
                    os.killpg(pid, signal.SIGKILL)

    @property
    def started(self) -> bool:
        """Say whether training had begun on every worker."""
        return bool(self._keys.check([f"started/{rank}" for rank in range(self._num_workers)]))

    def failures(self) -> list[Failure]:
        """Return how workers failed, once all have ended; empty if none did.

        Raises:
            Exception: what ended the launcher itself.
        """
        if self._outcome is None:
            return []
        if not isinstance(self._outcome, ChildFailedError):
            raise self._outcome
        found = self._outcome.failures
        failures = {r: read(r, each.exitcode, each.error_file_data) for r, each in sorted(found.items())}
        return closed_apart(failures, self._died_first, self._by_us)

    def close(self) -> None:
        """Remove what the attempt wrote; its store ends with the object."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        """Note who died first, and end what is left some time after that."""
        if self._first_dead_s is None:
            recorded = {int(file.parent.name) for file in self._folder.rglob("error.json")}
            self._died_first = recorded | {rank for rank, pid in self._pids().items() if _exit_code(pid)}
            self._first_dead_s = time.monotonic() if self._died_first else None
        elif time.monotonic() - self._first_dead_s > _CLOSING_S:
            self.kill()

    def _launch(self, arguments: Sequence[str]) -> None:
        rendezvous_handler_registry.register(_BACKEND, _Loopback)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._num_workers,
            run_id="pipebench",
            role="worker",
            rdzv_backend=_BACKEND,
            rdzv_configs={"store": self.store},
            max_restarts=0,
            # Seconds; longer than our own watch takes, so that it sees who died first.
            monitor_interval=0.3,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._folder)),
        )
        try:
            with _quiet():
                elastic_launch(config, sys.executable)(*arguments)
        except BaseException as error:
            self._outcome = error

    def _pids(self) -> dict[int, int]:
        """Return process ids by rank, of workers that have got as far as to write them down."""
        if len(self._found) < self._num_workers:
            for file in self._folder.rglob(launch_child.PID_FILE):
                words = file.read_text().split()
                if len(words) == 2:
                    self._found[int(words[0])] = int(words[1])
        return self._found


def _exit_code(pid: int) -> int | None:
    """Return a child's exit code, negative for a signal, None while it runs; leaves it to the launcher to collect.

    A child that has been collected is 0 here: the launcher knows more.
    """
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the launcher's own log off the terminal: what there is to say is said once, by pipebench."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torchelastic-events-null")]
    before, handler = [logger.propagate for logger in loggers], logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(handler)
