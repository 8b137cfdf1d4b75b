"""Small disks that can be filled or made read-only: in memory, in a mount namespace that ends with this process.

They need Linux and root.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_SIZE = "16m"
_FILLER = ".filler"


def why_not() -> str:
    """Return why this process can't make disks; "" if it can."""
    return "" if sys.platform == "linux" and os.geteuid() == 0 else "disks of their own need Linux and root"


def own_mounts() -> None:
    """Give this process, and those that it starts, a mount namespace of their own.

    Raises:
        OSError: the system refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount("--make-rprivate", "/")


def make(folder: Path) -> None:
    """Make a folder, and mount a small disk there."""
    folder.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder))


def remove(folder: Path) -> None:
    """Undo `make`, which deletes the files on the disk, or `make_read_only`."""
    subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def fill(folder: Path) -> None:
    """Fill a folder's disk to the last byte."""
    with contextlib.suppress(OSError), (folder / _FILLER).open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass


def free(folder: Path) -> None:
    """Undo `fill`."""
    (folder / _FILLER).unlink(missing_ok=True)


def make_read_only(folder: Path) -> None:
    """Make a folder read-only for files that are opened from now on."""
    _mount("--bind", str(folder), str(folder))
    _mount("-o", "remount,ro,bind", str(folder))


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)
