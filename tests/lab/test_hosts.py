"""Labs that are made, and removed however they end; they need root."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab import cleaner
from tests.lab.hosts import Lab, LabError, clean
from tests.lab.machine import needs_a_lab
from tests.lab.names import begun_ticks, namespaces
from tests.patience import wait_for

pytestmark = needs_a_lab

# A process that makes a lab with a process in it, prints its name, and waits.
_OWNER = """
import sys
from tests.lab.hosts import Lab, ended_by_signals
from tests.lab.cleaner import processes_in
with ended_by_signals(), Lab(3) as lab:
    busy = lab.start(1, [sys.executable, "-I", "-S", "-c", "input()"], stdin=-1)
    while busy.pid not in processes_in(f"{lab.name}-host1"):
        pass
    print(lab.name, busy.pid, lab._cleaner.pid, flush=True)
    sys.stdin.read()
"""


def existing(lab: str) -> list[str]:
    return [name for name in os.listdir(cleaner.NETNS) if name.startswith(f"{lab}-")]


def is_running(pid: int) -> bool:
    return begun_ticks(pid) is not None


@contextmanager
def owner() -> Iterator[tuple["subprocess.Popen[str]", str, int, int]]:
    """A process that has a lab; its name, the process in it, and its cleaner."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _OWNER], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            lab, busy, watching = process.stdout.readline().split()
            assert sorted(existing(lab)) == sorted(namespaces(lab, 3))
            yield process, lab, int(busy), int(watching)
        finally:
            process.kill()


def test_hosts_reach_each_other_and_are_removed() -> None:
    with Lab(2) as lab:
        assert sorted(existing(lab.name)) == namespaces(lab.name, 2)
        listening = (
            "import socket; server = socket.create_server(('10.77.0.101', 5000)); print(1, flush=True)\n"
            "print(server.accept()[1][0])"
        )
        server = lab.start(0, [sys.executable, "-I", "-c", listening], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        calling = "import socket; socket.create_connection(('10.77.0.101', 5000)); print(socket.gethostname())"
        client = lab.start(1, [sys.executable, "-I", "-c", calling], stdout=subprocess.PIPE)
        assert client.communicate()[0] == "host1\n"
        assert server.communicate()[0] == "10.77.0.102\n"
        sent, received = lab.counters(1), lab.counters(0)
        assert 0 < sent.sent_bytes == received.received_bytes
        assert os.uname().nodename != "host1"
    assert existing(lab.name) == []


def test_wires_are_limited_changed_and_freed() -> None:
    def rates(lab: Lab) -> list[int]:
        shown = (["tc", "-n", name, "-j", "qdisc", "show", "dev", "eth0"] for name in namespaces(lab.name, 2))
        found = (json.loads(subprocess.run(words, capture_output=True, check=True).stdout) for words in shown)
        return [8 * row["options"]["rate"] for rows in found for row in rows if row["kind"] == "tbf"]

    with Lab(2) as lab:
        assert rates(lab) == []
        lab.limit(1.25e8)
        assert rates(lab) == [1_000_000_000] * 2
        lab.limit(2.5e6)
        assert rates(lab) == [20_000_000] * 2
        lab.unlimit()
        lab.unlimit()
        assert rates(lab) == []
        with pytest.raises(LabError, match=r"the lab can't be made: `tc -n .* rate 0bit .*` failed: "):
            lab.limit(0.0)


def test_a_destroyed_host_takes_its_processes_with_it() -> None:
    with Lab(3) as lab:
        process = lab.start(2, [sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
        wait_for(lambda: process.pid in cleaner.processes_in(f"{lab.name}-host2"), "the process to enter its host")
        lab.destroy(2)
        assert process.wait() == -signal.SIGKILL
        assert len(existing(lab.name)) == 3
        process.communicate()
    assert existing(lab.name) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_lab_is_removed_for_every_end_of_its_owner(number: signal.Signals) -> None:
    with owner() as (process, lab, busy, watching):
        process.send_signal(number)
        process.wait()
        wait_for(
            lambda: not existing(lab) and not is_running(busy) and not is_running(watching), f"{lab} to be removed"
        )


def test_the_next_lab_removes_one_that_its_cleaner_left_and_no_living_one() -> None:
    with owner() as (_, living, _, _), owner() as (process, lab, busy, watching):
        os.kill(watching, signal.SIGKILL)
        process.kill()
        process.wait()
        assert len(existing(lab)) == 4
        assert set(namespaces(lab, 3)) <= set(clean())
        assert not is_running(busy)
        assert existing(lab) == []
        assert len(existing(living)) == 4
