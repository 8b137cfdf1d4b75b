"""Starts a few worker processes of one thread each, which do one job together.

A job is a module-level function. Every worker calls it with the same arguments after joining a Gloo process group over
the loopback interface; its result comes back as JSON. Workers never outlive their parent.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from pipebench.distributed.launch_join import serve
from pipebench.distributed.world import join
from pipebench.model.device import torch_settings
from pipebench.recipe.schema import EngineRecipe

_LOOPBACK = "127.0.0.1"
_ENVIRONMENT = {
    "MASTER_ADDR": _LOOPBACK,
    "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store, not rank 0
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic sides need it, and it is read once, before the first side
}
# Environment of workers that exchange values by sockets, as processes of different hosts do; an interface counts them.
BY_SOCKETS = {"BENCH_BY_SOCKETS": "1"}
ROOT = Path(__file__).parents[3]
_JOIN_LIMIT_S = 600.0
_POLL_S = 0.05


def engine(device: str) -> EngineRecipe:
    """Return the engine's settings for all sides; whether kernels are deterministic is set per side."""
    return EngineRecipe(threads=1 if device == "cpu" else "auto", deterministic=False)


def run(
    job: Callable[..., Any],
    num_processes: int,
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 900,
    device: str = "cpu",
) -> list[Any]:
    """Start workers that do a job; return the results by rank.

    Args:
        job: a module-level function.
        num_processes: number of workers.
        arguments: of the job, as JSON can hold them.
        environment: variables to add.
        limit_s: seconds after which the workers are killed.
        device: `cpu` or `cuda`.

    Raises:
        RuntimeError: a worker failed, or the time was up; with the end of the workers' standard error.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "arguments").write_text(json.dumps(arguments))
        store = serve(_LOOPBACK)
        shared = {
            **os.environ,
            **_ENVIRONMENT,
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            **(environment or {}),
        }
        command = [sys.executable, "-m", __name__, f"{job.__module__}:{job.__qualname__}", str(folder), device]
        processes = []
        try:
            for rank in range(num_processes):
                with (folder / f"errors{rank}").open("w") as errors:
                    own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdin=subprocess.PIPE, stderr=errors))
            _wait(processes, folder, time.monotonic() + limit_s)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
            del store
        return [json.loads((folder / f"result{rank}").read_text()) for rank in range(num_processes)]


class Taken(NamedTuple):
    """The times of some work in all processes."""

    slowest_s: float  # wall time of the slowest process
    processor_s: float  # CPU time of all threads of all processes


def together(work: Callable[[], object]) -> Taken:
    """Do some work in all processes, begun at the same time; return its times, the same in all processes."""
    wait_for_device()
    distributed.barrier()
    started, processor = time.perf_counter(), time.process_time()
    work()
    wait_for_device()
    slowest = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    total = torch.tensor([time.process_time() - processor], dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    distributed.all_reduce(total)
    return Taken(float(slowest), float(total))


def wait_for_device() -> None:
    """Wait for the kernels that this process has launched on a GPU, if it uses one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, until: float) -> None:
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    bad = {rank: process.poll() for rank, process in enumerate(processes) if process.poll() != 0}
    if bad:
        errors = "\n".join((folder / f"errors{rank}").read_text()[-4000:] for rank in bad)
        raise RuntimeError(f"processes ended or had to be ended (rank to exit code: {bad}):\n{errors}")


def _end_with_parent() -> None:
    sys.stdin.read()  # the parent writes nothing, so this returns when the parent is gone
    os._exit(3)


def _member(job: str, folder: Path, device: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, function = job.split(":")
    call = getattr(importlib.import_module(module), function)
    world = join(device, limit_s=_JOIN_LIMIT_S, shares_memory=not BY_SOCKETS.keys() & os.environ.keys())
    with torch_settings(engine(device)):
        result = call(**json.loads((folder / "arguments").read_text()))
    (folder / f"result{world.rank}").write_text(json.dumps(result))
    world.barrier()
    world.close()
    os._exit(0)  # a normal exit would wait for the thread that reads standard input


if __name__ == "__main__":
    _member(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
