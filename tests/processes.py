"""Persistent processes that run one function after another, so that a process group is made once for many tests."""

import faulthandler
import importlib
import os
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch import multiprocessing

from pipebench.distributed.launch_join import HostSlot
from tests.patience import PATIENCE_S

# Modules that the fork server imports, which takes seconds, for forked processes of `Processes` and `tests.commands`.
# None of them starts a thread, which a forked process would lack.
IMPORTED = [
    "pipebench.distributed.engine",
    "pipebench.run.drawings",
    "pipebench.run.processes",
    "pipebench.run.runner",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.tracking",
    "sympy",  # torch imports it in its first backward
    "torch._dynamo",  # and this in an optimizer's first step
    "tests.distributed.cases",
]
_STACKS_AFTER_S = 60.0  # until a process that hangs prints its stack
_AFTER_A_FAILURE_S = 5.0  # for other processes to answer or end after one has failed


def reserved_port() -> socket.socket:
    """Return a bound socket that reserves a port of 127.0.0.1, on which a store can be served.

    Until the store listens, other processes that ask for any free port don't get it.
    """
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that a server with the same option may listen
    found.bind(("127.0.0.1", 0))
    return found


class Processes:
    """Processes of one process group on this machine, as a context manager.

    Args:
        size: number of processes.
        device: `cpu` or `cuda`.
        environment: variables of the processes.
    """

    def __init__(self, size: int, device: str = "cpu", environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._port = reserved_port()
        port = self._port.getsockname()[1]
        context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            # Not with CUDA, which can't be used in a process that is forked from one that has initialised it.
            context.set_forkserver_preload(IMPORTED)
        self._pipes: list[Connection] = []
        self._processes = []
        self._lost: set[int] = set()
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, port, device, dict(environment), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes, and check that they end cleanly unless one was lost."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.0 if self._lost else _AFTER_A_FAILURE_S if error else PATIENCE_S)
            process.kill()
            process.join()
        self._port.close()
        if error is None and not self._lost:
            assert [process.exitcode for process in self._processes] == [0] * len(self._processes)

    def __len__(self) -> int:
        return len(self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._port.close()

    def run(self, function: str, *args: Any, lost: Sequence[int] = (), **kwargs: Any) -> list[Any]:
        """Call a function in every process and return the results by rank.

        Args:
            function: `module:function`, whose first argument is the `World`.
            args: further arguments, as they can be pickled.
            lost: ranks that the call kills, for which None is returned; nothing can run here afterwards. If one has
                died, those that don't notice it are killed, as launchers do.
            kwargs: further arguments.

        Raises:
            AssertionError: a process raised, with its traceback, or gave no answer.
        """
        test = os.environ.get("PYTEST_CURRENT_TEST", "")  # the processes have that of the test that started them
        for pipe in self._pipes:
            pipe.send((test, function, args, kwargs))
        self._lost |= set(lost)
        answers: dict[int, tuple[bool, Any]] = {}
        limit_s = time.monotonic() + PATIENCE_S
        while len(answers) < len(self._pipes):
            waiting = {rank: pipe for rank, pipe in enumerate(self._pipes) if rank not in answers}
            found = connection.wait(list(waiting.values()), max(0.0, limit_s - time.monotonic()))
            has_died = not answers.keys().isdisjoint(lost)
            for rank in [rank for rank, pipe in waiting.items() if pipe in found or not found]:
                if found:
                    answers[rank] = self._answer(rank, lost)
                elif has_died and rank in lost:
                    self._processes[rank].kill()
                    answers[rank] = True, None
                else:
                    answers[rank] = False, f"no answer to {function}"
            if any(not fine for fine, _ in answers.values()):  # other processes may wait for one that failed
                limit_s = min(limit_s, time.monotonic() + _AFTER_A_FAILURE_S)
            if not answers.keys().isdisjoint(lost):
                limit_s = min(limit_s, time.monotonic() + _STACKS_AFTER_S)
        failed = [f"rank {rank}:\n{text}" for rank, (fine, text) in sorted(answers.items()) if not fine]
        assert not failed, "\n".join(failed)
        return [value for _, (_, value) in sorted(answers.items())]

    def _answer(self, rank: int, lost: Sequence[int]) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = self._pipes[rank].recv()
        except EOFError:
            return rank in lost, None if rank in lost else "gone"
        return answer


def _serve(rank: int, size: int, port: int, device: str, environment: dict[str, str], pipe: Connection) -> None:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environment})
    torch.set_num_threads(1)
    from pipebench.distributed.world import join

    place = HostSlot(rank, size, rank, size, "127.0.0.1", port, agent_store=False, attempt=None)
    world = join(device, limit_s=PATIENCE_S, place=place)
    while True:
        try:
            os.environ["PYTEST_CURRENT_TEST"], name, args, kwargs = pipe.recv()
        except EOFError:
            break
        module, function = name.split(":")
        faulthandler.dump_traceback_later(_STACKS_AFTER_S)
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(world, *args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    world.close()
