"""Where files lie: a data set's folder, the user's cache, and how to write a file so that it's whole or not there."""

import os
from pathlib import Path

from pipebench import files

DATA_VARIABLE = "PIPEBENCH_DATA"


def data_folder(dataset: str, root: str, holds: str = "") -> Path:
    """Return the folder a data set is read from; needn't exist.

    It is `root`; where that is empty, the folder of the data set's name in the one that PIPEBENCH_DATA names. `holds`
    is what is expected in it, for the message.

    Raises:
        FileNotFoundError: neither is given.
    """
    if root:
        return Path(root).expanduser()
    base = os.environ.get(DATA_VARIABLE, "")
    if not base:
        raise FileNotFoundError(
            f"{dataset}: no folder is given, set its option root, or {DATA_VARIABLE} to the folder that has {dataset}/"
            + (f"; it holds {holds}" if holds else "")
        )
    return Path(base).expanduser() / dataset


def cache_folder(*parts: str) -> Path:
    """Return a folder in the user's cache: XDG_CACHE_HOME or ~/.cache, then pipebench; needn't exist.

    Where the user has no home, as in a container, it is one that can't be made: caches are lost, and no result.
    """
    base, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    return Path(base or os.path.join(os.devnull if home == "~" else home, ".cache"), "pipebench", *parts)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file aside and rename it, so that a reader never sees half of it.

    Raises:
        OSError: the folder can't be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, content)
