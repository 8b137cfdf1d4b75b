"""Freed blocks are reused by the allocator: page faults of a new process are counted.

The blocks are Python's: importing torch, whose tensors come from the same allocator, takes most of two seconds.
"""

import os
import platform
import subprocess
import sys

import pytest

_CODE = """
import resource, sys
from pipebench.model.heap import keep_freed_blocks
if sys.argv[1] == "kept":
    keep_freed_blocks()
def fill():
    for size in (1 << 22, 1 << 24, 36 << 20):  # glibc keeps no block above 32 MB by itself
        bytearray(size)
fill()
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    command = [sys.executable, "-c", _CODE, how]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_freed_blocks_are_reused_without_page_faults() -> None:
    assert faults("kept") < faults("given back") / 5


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_the_user_s_settings_stay() -> None:
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 10_000
