"""The memory that processes of a host can still take."""

import math
from pathlib import Path

import pytest

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


HOST_BYTES = 4096 * 1024


@pytest.mark.parametrize(
    ("groups", "limit", "used", "stat", "available"),
    [
        ("0::/a/b\n", {"memory.max": "900\n"}, {"memory.current": "500\n"}, "anon 1\ninactive_file 30\n", 430),
        ("0::/a/b\n", {"memory.max": "900\n"}, {"memory.current": "950\n"}, "inactive_file 30\n", 0),
        ("0::/a/b\n", {"memory.max": "max\n"}, {"memory.current": "500\n"}, "inactive_file 30\n", HOST_BYTES),
        ("0::/a/b\n", {"memory.max": "nonsense\n"}, {"memory.current": "500\n"}, "inactive_file 30\n", HOST_BYTES),
        (
            "7:cpu:/b\n4:memory:/a/b\n",
            {"memory.limit_in_bytes": "900\n"}, {"memory.usage_in_bytes": "500\n"},
            "inactive_file 7\ntotal_inactive_file 20\n", 420,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("group", ["", "a", "a/b"])
def test_control_groups_limit_memory(
    tmp_path: Path, group: str, groups: str, limit: dict[str, str], used: dict[str, str], stat: str, available: float
) -> None:
    """A group's own limit, and those of the groups that it is in."""
    folder = f"sys/fs/cgroup/{'memory' if 'memory' in groups else ''}/{group}"
    of_group = {f"{folder}/{name}": text for name, text in {**limit, **used, "memory.stat": stat}.items()}
    host = "MemAvailable: 4000 kB\nSwapFree: 96 kB\n"
    for name, text in {"proc/meminfo": host, "proc/self/cgroup": groups, **of_group}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == available
