"""Labs: emulated hosts and wires that exist inside a `with` statement, however that ends.

A lab is removed by the end of `with`; by a cleaner process, if its owner dies before; and, if both are killed, by the
next lab, which knows from the namespaces' names that their owner is gone.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from pipebench.distributed import launch_child
from pipebench.errors import UserError
from tests.lab import cleaner, inside, wires
from tests.lab.names import host_name, lab_name, left_behind, namespaces, this_process

_NUMBERS = itertools.count()
_TOOLS = ("ip", "tc")
# Settings of every host. Reno is in every kernel, and without loss it sends as much as the wire transmits. Without
# IPv6, training is the only traffic.
_SETTINGS = {"/proc/sys/net/ipv4/tcp_congestion_control": "reno", "/proc/sys/net/ipv6/conf/all/disable_ipv6": "1"}
_SET = "import sys\nfor path, value in zip(sys.argv[1::2], sys.argv[2::2]):\n    open(path, 'w').write(value)"


class LabError(UserError, RuntimeError):
    """The kernel refuses a part of the lab: it may lack a module, such as `veth` or `sch_tbf`."""


@dataclass(frozen=True)
class Counters:
    """The traffic of a host's interface since it was made, Ethernet headers included.

    A packet of up to 64 kB counts its headers once, however many frames it would be on a cable.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int


def why_not() -> str:
    """Return in one sentence why this process can't make a lab; "" if it can."""
    if sys.platform != "linux":
        return f"a lab needs the network namespaces of Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "a lab needs root, which alone may make network namespaces; try sudo, or a container with --privileged"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"a lab needs {' and '.join(missing)} of iproute2, which isn't there: install the package iproute2"
    return ""


def clean() -> list[str]:
    """Remove the namespaces of labs whose owners are gone; return their names."""
    existing = sorted(os.listdir(cleaner.NETNS)) if cleaner.NETNS.is_dir() else []
    return cleaner.remove(left_behind(existing))


class Lab:
    """Hosts joined by wires, as a context manager.

    Args:
        num_hosts: two or more.

    Attributes:
        name: beginning of the names of its namespaces.
        num_hosts: number of hosts.
    """

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts = num_hosts
        self.name = lab_name(this_process(), next(_NUMBERS))
        self._limited = False

    def __enter__(self) -> Self:
        """Make hosts and wires, without limits.

        Raises:
            UserError: there can be no lab here.
            LabError: the kernel refuses a part of it.
        """
        refused = why_not()
        if refused:
            raise UserError(refused)
        clean()
        names = namespaces(self.name, self.num_hosts)
        command = [sys.executable, "-I", "-S", cleaner.__file__, *names]
        self._cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._cleaner.stdout is not None
        self._cleaner.stdout.readline()  # it ignores signals from now on
        try:
            _execute(wires.building(self.name, self.num_hosts))
            for index in range(self.num_hosts):
                words = [word for setting in _SETTINGS.items() for word in setting]
                subprocess.run([*self._entering(index), sys.executable, "-I", "-S", "-c", _SET, *words], check=True)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the lab, and kill the processes in it."""
        self.close()

    def close(self) -> None:
        """Remove the lab, and kill the processes in it."""
        cleaner.remove(namespaces(self.name, self.num_hosts))
        self._cleaner.communicate()

    def limit(self, bandwidth_bytes_per_s: float) -> None:
        """Set the bandwidth of every wire, in each direction; also while processes run.

        Raises:
            LabError: the kernel refuses it.
        """
        for index in range(self.num_hosts):
            self.limit_host(index, bandwidth_bytes_per_s)

    def limit_host(self, index: int, bandwidth_bytes_per_s: float) -> None:
        """Set the bandwidth of one host's wire, in each direction."""
        _execute(wires.limiting(self.name, self.num_hosts, index, bandwidth_bytes_per_s))
        self._limited = True

    def unlimit(self) -> None:
        """Remove the limits of all wires, if there are any."""
        if self._limited:
            hosts = range(1 if self.num_hosts == 2 else self.num_hosts)  # two hosts share a wire
            for index in hosts:
                _execute(wires.unlimiting(self.name, self.num_hosts, index))
        self._limited = False

    def unplug(self, index: int) -> None:
        """Let nothing pass a host's wire any more; connections stay open."""
        _execute(wires.switching(self.name, index, "down"))

    def plug(self, index: int) -> None:
        _execute(wires.switching(self.name, index, "up"))

    def destroy(self, index: int) -> None:
        """Remove a host and kill its processes; first it is unplugged, so that its connections aren't closed."""
        self.unplug(index)
        cleaner.remove([f"{self.name}-{host_name(index)}"])

    def kill(self, index: int) -> None:
        """Kill all processes of a host; the kernel closes their connections, so that their peers notice."""
        cleaner.kill([f"{self.name}-{host_name(index)}"])

    def counters(self, index: int) -> Counters:
        """Return the traffic of a host's interface."""
        shown = _execute([("ip", "-n", f"{self.name}-{host_name(index)}", "-s", "-j", "link", "show", wires.INTERFACE)])
        rows: list[dict[str, Any]] = json.loads(shown)
        sent, received = rows[0]["stats64"]["tx"], rows[0]["stats64"]["rx"]
        return Counters(sent["bytes"], sent["packets"], received["bytes"])

    def start(
        self, index: int, command: Sequence[str], *, name: str | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a process on a host; it is killed when this process ends.

        Args:
            index: of the host.
            command: program and arguments.
            name: host name that the process sees; `host0`, `host1`, ... by default.
            options: of `subprocess.Popen`.
        """
        child = [sys.executable, "-I", "-S", launch_child.__file__, str(os.getpid())]
        return subprocess.Popen(
            [*child, *self._entering(index, name), *command], text=True, start_new_session=True, **options
        )

    def _entering(self, index: int, name: str | None = None) -> list[str]:
        host = host_name(index)
        return [sys.executable, "-I", "-S", inside.__file__, f"{self.name}-{host}", name or host]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP, too, so that the lab is removed."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _execute(commands: Sequence[wires.Command]) -> str:
    """Run commands one after another; return the output of the last one."""
    said = ""
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            why = done.stderr.strip() or f"exit code {done.returncode}"
            raise LabError(f"the lab can't be made: `{' '.join(command)}` failed: {why}")
        said = done.stdout
    return said


def environment(index: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of training processes on a host, which use its only interface."""
    return {**base, "GLOO_SOCKET_IFNAME": wires.INTERFACE, "NCCL_SOCKET_IFNAME": wires.INTERFACE}
