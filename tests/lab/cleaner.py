"""Removes a lab: as a process, `python cleaner.py NAMESPACE...`, as soon as its standard input ends.

The process that made the lab holds the other end of that pipe, so the pipe ends with it, even after `kill -9`. Only the
standard library is imported, so that it starts fast and nothing can fail.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NETNS = Path("/run/netns")
_KILLING_S, _POLL_S = 10.0, 0.01


def main(names: Sequence[str]) -> None:
    """Wait for the end of standard input, then remove the namespaces."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print("watching", flush=True)
    while sys.stdin.buffer.read(1 << 16):
        pass
    remove(names)


def remove(names: Sequence[str]) -> list[str]:
    """Kill all processes inside some namespaces and remove these; return the namespaces that existed."""
    existing = [name for name in names if (NETNS / name).exists()]
    kill(existing)
    for name in existing:
        # Another process, such as the next lab, may have removed it first.
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return existing


def kill(names: Sequence[str]) -> None:
    """Kill all processes inside some namespaces, and wait until they have ended."""
    until_s = time.monotonic() + _KILLING_S
    while time.monotonic() < until_s:
        living = [pid for name in names for pid in processes_in(name)]
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not living:
            return
        time.sleep(_POLL_S)


def processes_in(name: str) -> Iterator[int]:
    """Yield the ids of the processes in a network namespace; zombies are in none."""
    with contextlib.suppress(OSError):
        wanted = os.stat(NETNS / name)
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdecimal():
                    found = os.stat(f"/proc/{entry}/ns/net")
                    if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                        yield int(entry)


if __name__ == "__main__":
    main(sys.argv[1:])
