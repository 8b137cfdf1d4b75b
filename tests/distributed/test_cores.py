"""The number of cores that a run may use, and the warnings if its processes share them."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipebench.distributed import cores
from pipebench.distributed.cores import crowding, numbered, processor_shares, shared_processors, turns_of
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.meter import MeasuredMeter
from pipebench.model.cores import name_of_cores, usable_cores
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.simulate.costs import HostCosts, SharedProcessors
from pipebench.simulate.meter import PREDICTION


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a system without control groups, where this process may run on 8 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V1 = "12:memory:/a\n3:cpu,cpuacct:/a/b\n0::/\n"
V1_GROUP = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/cpu.max": "200000 100000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, 8),
        (
            {
                "proc/self/cgroup": V1,
                f"{V1_GROUP}/a/b/cpu.cfs_quota_us": "-1\n",
                f"{V1_GROUP}/a/b/cpu.cfs_period_us": "100000\n",
                f"{V1_GROUP}/a/cpu.cfs_quota_us": "50000\n",
                f"{V1_GROUP}/a/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        # In a container: the host's path, and the group's own files at the top.
        (
            {
                "proc/self/cgroup": V1,
                f"{V1_GROUP}/cpu.cfs_quota_us": "300000\n",
                f"{V1_GROUP}/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_affinity_and_control_groups_limit_cores(root: Path, files: dict[str, str], expected: float) -> None:
    write(root, files)
    assert usable_cores(root) == expected


def test_where_there_is_no_affinity_all_cores_are_usable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_cores(root) == 64


def test_cores_are_named_alike_where_processes_compete_for_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(host: str, cores: set[int]) -> str:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores, raising=False)
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        return name_of_cores(root)

    assert named("a", {0, 1}) != named("b", {0, 1})  # not Linux
    write(root, {"proc/sys/kernel/random/boot_id": "one-machine\n"})
    assert named("a", {0, 1}) == named("b", {0, 1}) == "one-machine's 0,1"  # containers
    assert named("a", {0}) != named("a", {1})  # bound by a launcher
    write(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"})
    assert named("a", {0, 1}) != named("b", {0, 1})  # a quota each


def test_cached_profiles_are_found_on_other_cores_of_the_hosts() -> None:
    assert numbered([bound(0), bound(1)]) == numbered([bound(2), bound(5)])
    assert numbered([bound(0), bound(1)]) != numbered([bound(0), bound(0)])
    assert numbered([bound(0), bound(1)]) != numbered([bound(0), bound(1, host="b")])


Shares = list[dict[str, Any]]


def share(host: str = "a", threads: int = 1, cores: float = 2) -> Shares:
    return [{"name": f"{host}'s 0,1", "host": host, "kind": "core", "threads": threads, "capacity": cores}]


def gpu(number: int, host: str = "a", cores: float = 16) -> Shares:
    queue = {"name": f"{number} of {host}", "host": host, "kind": "GPU", "threads": 1, "capacity": 1.0}
    return [*share(host, 1, cores), queue]


def bound(*cores: int, host: str = "a", machine: str = "x") -> Shares:
    """Return the share of a process that a launcher, or a container, limits to some cores."""
    one = {"name": f"{machine}'s {cores}", "host": host, "kind": "core", "threads": 1, "capacity": float(len(cores))}
    return [one]


@pytest.mark.parametrize(
    ("shares", "note"),
    [
        ([share()] * 2, ""),
        ([share(threads=2)], ""),
        ([share()] * 4, "4 processes x 1 thread share 2 usable cores; the prediction does not model that"),
        ([share(threads=3)], "1 process x 3 threads share 2 usable cores; the"),
        ([share(threads=2, cores=1)] * 2, "2 processes x 2 threads share 1 usable core; the"),
        ([share(cores=1.5)] * 2, "2 processes x 1 thread share 1.5 usable cores; the"),
        ([share(threads=1), share(threads=4)], "2 processes x 1 to 4 threads share 2 usable cores; the"),
        ([*[share("a")] * 2, *[share("b")] * 3], "3 processes x 1 thread share 2 usable cores on one of 2 hosts; the"),
        ([*[share("a", cores=2)] * 2, *[share("b", cores=8)] * 8], ""),
        ([bound(0), bound(1)], ""),
        ([bound(0), bound(1), bound(1)], "2 processes x 1 thread share 1 usable core; the"),
        ([bound(0, 1, host=host) for host in "abc"], "3 processes x 1 thread share 2 usable cores; the"),
        ([bound(0, 1, host=host, machine=host) for host in "abc"], ""),
        ([gpu(0), gpu(1)], ""),
        ([gpu(0), gpu(1), gpu(0)], "2 processes share one GPU; the prediction does not model that"),
        ([gpu(0), gpu(0), gpu(0, "b")], "2 processes share one GPU on one of 2 hosts; the"),
        ([gpu(number, cores=2) for number in range(4)], "4 processes x 1 thread share 2 usable cores; the"),
    ],
)
def test_shared_cores_are_reported(shares: list[Shares], note: str) -> None:
    assert crowding(shares).startswith(note)
    assert bool(crowding(shares)) == bool(note)


def test_workers_that_share_cores_report_it() -> None:
    note = "4 processes x 1 thread share 2 usable cores; the prediction deals them out evenly"
    assert crowding([share()] * 4, simulated=True) == note
    note = "3 processes share one GPU; the prediction deals them out evenly"
    assert crowding([gpu(0)] * 3, simulated=True) == note
    note = "4 processes x 1 thread share 1 usable core; the prediction does not model that"  # but the GPUs' sharing
    assert crowding([gpu(number // 2, cores=1) for number in range(4)], simulated=True) == note


@pytest.mark.parametrize(
    ("shares", "turns"),
    [
        ([share()] * 2, [0, 0]),
        ([share()] * 3, [0, 0, 1]),
        ([share(threads=2)] * 3, [0, 1, 2]),
        ([share(threads=3)] * 2, [0, 1]),  # more than there are, even alone
        ([share(cores=1.5)] * 2, [0, 1]),
        ([share("a"), share("b")] * 2, [0, 0, 0, 0]),
        ([*[share("a")] * 4, *[share("b")] * 2], [0, 0, 1, 1, 0, 0]),
        ([share(), share(threads=2), share()], [0, 1, 0]),
        ([bound(0), bound(1)], [0, 0]),
        ([gpu(0), gpu(1), gpu(0), gpu(1)], [0, 0, 1, 1]),
        ([gpu(0), gpu(0), gpu(1)], [0, 1, 0]),
        ([gpu(number, cores=2) for number in range(3)], [0, 0, 1]),
    ],
)
def test_processes_take_turns_so_that_every_thread_has_a_core(shares: list[Shares], turns: list[int]) -> None:
    assert turns_of(shares) == turns


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([share()] * 2, None),
        ([share()] * 3, SharedProcessors(2, 1, (0, 0, 0))),
        ([share(threads=2)] * 2, SharedProcessors(2, 2, (0, 0))),
        ([share(cores=0.5)], SharedProcessors(0.5, 1, (0,))),
        ([*[share("a")] * 3, share("b")], SharedProcessors(2, 1, (0, 0, 0, 1))),
        ([*[share("a")] * 3, share("b", cores=4)], None),
        ([bound(0), bound(1)], None),
        ([bound(0, 1, host=host) for host in "abc"], SharedProcessors(2, 1, (0, 0, 0))),
        ([share(), share(threads=2)], SharedProcessors(2, 2, (0, 0))),
        ([gpu(0), gpu(1)], None),
        ([gpu(0), gpu(1), gpu(0)], SharedProcessors(1.0, 1, (0, 1, 0))),
        ([gpu(0), gpu(0), gpu(0, "b")], SharedProcessors(1.0, 1, (0, 0, 1))),
    ],
)
def test_processors_that_are_shared_are_simulated(shares: list[Shares], expected: SharedProcessors | None) -> None:
    assert shared_processors(shares) == expected


def test_a_process_whose_gpu_computes_keeps_one_core_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 4.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(cores, "name_of_cores", lambda: "a's 0,1")
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"{device.index} of a")
    )
    assert processor_shares(torch.device("cpu")) == share(threads=3, cores=4.0)
    assert processor_shares(torch.device("cuda", 7)) == gpu(7, cores=4.0)


@pytest.mark.parametrize(("num_cores", "note"), [(1.0, True), (2.0, False)])
def test_a_run_s_measurements_carry_the_note(num_cores: float, note: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: num_cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    pipeline = Pipeline((1, 1), chain(2), "1f1b", flushes=False, depth=2)
    engine: Any = DistributedEngine.__new__(DistributedEngine)
    engine.setup = SimpleNamespace(
        device=torch.device("cpu"), pipeline=pipeline, costs=SimpleNamespace(host=HostCosts())
    )
    engine.meter = MeasuredMeter(pipeline, 0, rank=0)
    other = MeasuredMeter(pipeline, 1, rank=1).share()
    engine.exchange = lambda value: [value, [other, *value[1:]]]
    engine._all = SimpleNamespace(exchange=lambda value: [value, value])
    notes = engine.measured(1.0).notes
    assert notes.get(PREDICTION, "").startswith("2 processes x 1 thread share 1 usable core") == note
