"""Names of a lab's network namespaces, which identify the owner's process, so that no others are ever removed.

Process ids are reused; a process id with the process's start time, in the kernel's ticks, is unique.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SWITCH = "switch"
_NAME = re.compile(
    r"pipebench-lab-(?P<pid>[0-9]+)\.(?P<ticks>[0-9]+)\.(?P<number>[0-9]+)-(host[0-9]+|switch)", re.ASCII
)
_STARTTIME = 22 - 3  # index in /proc/PID/stat after the command's name, counted from the third field


@dataclass(frozen=True)
class Owner:
    """A process that has labs."""

    pid: int  # process id
    ticks: int  # start time, in the kernel's ticks since boot

    @property
    def is_alive(self) -> bool:
        """Whether the process exists; a later process with its id doesn't count."""
        return begun_ticks(self.pid) == self.ticks


def this_process() -> Owner:
    ticks = begun_ticks(os.getpid())
    assert ticks is not None
    return Owner(os.getpid(), ticks)


def begun_ticks(pid: int) -> int | None:
    """Return the start time of a process, in ticks since boot; None if it doesn't exist or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # a command's name may hold blanks and brackets
    return None if state in "ZX" else int(fields[_STARTTIME - 1])


def lab_name(owner: Owner, number: int) -> str:
    """Return the beginning of the names of a lab's namespaces; labs of one owner have different numbers."""
    return f"pipebench-lab-{owner.pid}.{owner.ticks}.{number}"


def host_name(index: int) -> str:
    return f"host{index}"


def namespaces(lab: str, num_hosts: int) -> list[str]:
    """Return the names of all namespaces of a lab: one per host, and one for the switch if there are more than two."""
    inside = [host_name(index) for index in range(num_hosts)] + ([SWITCH] if num_hosts > 2 else [])
    return [f"{lab}-{name}" for name in inside]


def left_behind(names: Iterable[str]) -> list[str]:
    """Return the namespaces that belong to labs whose owner is gone."""
    owned = ((name, _NAME.fullmatch(name)) for name in names)
    return [name for name, match in owned if match and not Owner(int(match["pid"]), int(match["ticks"])).is_alive]
