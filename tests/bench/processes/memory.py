"""Peak memory of a process, as the kernel counts its resident pages (Linux)."""

import gc
from collections.abc import Callable
from pathlib import Path

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"


def can_measure() -> bool:
    """Return whether this system counts a peak that can be set back."""
    return _CLEAR.exists() and _STATUS.exists()


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes(make: Callable[[], Callable[[], object]]) -> int:
    """Return by how much the peak of some work exceeds what is resident now: after imports, with the data loaded.

    What making the work (`make`) needs for a moment, such as the whole model before it is cut, doesn't count; what it
    keeps does.
    """
    gc.collect()
    before = resident_bytes()
    work = make()
    gc.collect()
    _CLEAR.write_text(_RESET_PEAK)
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:")]
    return 1024 * int(line.split()[1])
