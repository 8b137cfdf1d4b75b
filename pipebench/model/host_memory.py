"""The memory of this host that processes can still take, also in a container."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from pipebench.model.control_groups import folders

# A control group's limit, the bytes it has, and those of them that are of files and would be freed, by version.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> float:
    """Return the bytes that processes of this host can still take: the least of the host's and its control groups'.

    The host's swap space is included, a control group's is not. It is infinite where the system doesn't say, which
    Linux does. The system's files are under `root`.
    """
    return min([_of_host(root), *(left for folder in folders("memory", root) for left in _of_group(folder))])


def _of_host(root: Path) -> float:
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return math.inf
    kilobytes = {name: int(number) for name, number in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    if "MemAvailable" not in kilobytes:
        return math.inf
    return 1024.0 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))


def _of_group(folder: Path) -> Iterator[float]:
    """Yield the bytes that a control group has left, if it has a limit."""
    for limit, used, freed in _FILES:
        try:
            most = (folder / limit).read_text(encoding="ascii").strip()
            has = int((folder / used).read_text(encoding="ascii"))
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            counts = dict(line.split() for line in lines)
            if most != "max":
                yield max(0.0, float(int(most) - has + int(counts[freed])))
        except (OSError, ValueError, KeyError):  # unreadable limits are ignored
            continue
