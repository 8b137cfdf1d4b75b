"""The memory that processes of a host can still take."""

import math
from pathlib import Path

from pipebench.model.host_memory import available_bytes


def test_free_memory_and_swap_space_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    about = tmp_path / "proc" / "meminfo"
    about.write_text("MemTotal:  9000 kB\nMemFree:   100 kB\nMemAvailable:     4000 kB\nSwapFree:      96 kB\n")
    assert available_bytes(tmp_path) == 4096 * 1024
    about.write_text("MemTotal: 9000 kB\nHugePages_Total:  0\n")
    assert available_bytes(tmp_path) == math.inf


def test_a_system_that_does_not_say_has_no_limit(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == math.inf
