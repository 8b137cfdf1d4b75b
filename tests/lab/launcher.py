"""Starts training processes on a lab's hosts: torchrun on each, as on the hosts of a cluster."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from pipebench.distributed.launch import worker_settings
from pipebench.distributed.launch_child import python_module
from tests.lab import wires
from tests.lab.hosts import Lab, environment

_PORT = 29500  # every host has its own ports
_CLOSING_S = 30.0  # after one host's torchrun has failed, for the others to end by themselves
_POLL_S = 0.05


def torchrun(num_hosts: int, workers_per_host: int, index: int, words: Sequence[str]) -> list[str]:
    """Return torchrun's command on host `index`; `words` are module and arguments of every process."""
    first = wires.address(0)
    # torchrun can't find out whether the endpoint is its own address: no name server knows the host's name.
    is_first = f"is_host={int(index == 0)}"
    return [
        *python_module("torch.distributed.run"),
        *("--nnodes", str(num_hosts), "--nproc-per-node", str(workers_per_host)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{_PORT}", "--rdzv-id", "lab", "--rdzv-conf", is_first),
        *("--local-addr", wires.address(index), "--no-python", *python_module(words[0]), *words[1:]),
    ]


def start(
    lab: Lab,
    workers_per_host: int,
    words: Sequence[str],
    logs: Sequence[IO[Any]],
    name: str | None = None,
    **options: Any,
) -> list["subprocess.Popen[str]"]:
    """Start torchrun on every host.

    Args:
        lab: the hosts.
        workers_per_host: number of processes on each.
        words: module and arguments of every process.
        logs: files for the output of every host.
        name: host name that all processes see; each host's own by default.
        options: of `subprocess.Popen`; `env` are variables in addition to those of this process.
    """
    num_workers = lab.num_hosts * workers_per_host
    added = options.pop("env", {})
    settings = {**os.environ, **worker_settings(num_workers), **added, "PYTHONUNBUFFERED": "1"}
    return [
        lab.start(
            index, torchrun(lab.num_hosts, workers_per_host, index, words), name=name, env=environment(index, settings),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **options,
        )
        for index, log in enumerate(logs)
    ]  # fmt: skip


def run(lab: Lab, workers_per_host: int, words: Sequence[str], log: Path, name: str | None = None) -> int:
    """Run processes on every host to their end; return the largest exit code of torchrun. For arguments see `start`.

    `log` is for the output of host 0; the other hosts' logs are beside it.
    """
    paths = [log, *(log.with_suffix(f".host{index}.log") for index in range(1, lab.num_hosts))]
    files = [path.open("w") for path in paths]
    agents: list[subprocess.Popen[str]] = []
    try:
        agents = start(lab, workers_per_host, words, files, name)
        until_s = float("inf")
        while None in (codes := [agent.poll() for agent in agents]):
            if any(codes):
                until_s = min(until_s, time.monotonic() + _CLOSING_S)
            if time.monotonic() > until_s:
                break
            time.sleep(_POLL_S)
        return max(abs(code) for code in codes if code is not None)
    finally:
        for agent in agents:
            agent.terminate()
            try:
                agent.wait(_CLOSING_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        for file in files:
            file.close()
