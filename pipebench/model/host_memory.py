"""The memory of this host that processes can still take."""

import math
import re
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> float:
    """Return the bytes that processes of this host can still take, swap space included.

    It is infinite where the system doesn't say, which Linux does. Limits of control groups don't count. The system's
    files are under `root`.
    """
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return math.inf
    kilobytes = {name: int(number) for name, number in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    if "MemAvailable" not in kilobytes:
        return math.inf
    return 1024.0 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
