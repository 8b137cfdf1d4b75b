"""Peak memory of a process, as the kernel counts its resident pages (Linux)."""

import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"
# Modules that torch imports only when a side is made. With torch 2.15 they take 110 MB, several times what training
# takes.
_LATE = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils._sympy.reference",
)


def can_measure() -> bool:
    """Return whether this system has a peak of resident memory that can be reset."""
    return _CLEAR.exists() and _STATUS.exists()


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes(make: Callable[[], Callable[[], object]]) -> int:
    """Return the peak resident memory of some work, less what is resident before: imported modules and loaded data.

    Args:
        make: makes the work. Memory that it needs only temporarily, such as the whole model before it is cut, doesn't
            count; memory that the work keeps does.

    Raises:
        RuntimeError: modules were imported meanwhile, which would count as the work's memory.
    """
    for name in _LATE:
        importlib.import_module(name)
    gc.collect()
    before, known = resident_bytes(), {*sys.modules}
    work = make()
    gc.collect()
    _CLEAR.write_text(_RESET_PEAK)
    work()
    found = _status("VmHWM") - before
    if late := sorted({*sys.modules} - known):
        raise RuntimeError(f"imported while memory was measured: {', '.join(late)}")
    return found


def _status(key: str) -> int:
    (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:")]
    return 1024 * int(line.split()[1])
