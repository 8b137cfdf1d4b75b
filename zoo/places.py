"""Places of files: a data set's folder and the user's cache; and writing a file whole or not at all."""

import os
from pathlib import Path

from pipebench import files

DATA_VARIABLE = "PIPEBENCH_DATA"


def data_folder(dataset: str, root: str, holds: str = "") -> Path:
    """Return the folder that a data set is read from; it needn't exist.

    Args:
        dataset: the data set's name.
        root: the folder; empty: the folder of the data set's name inside of that named by PIPEBENCH_DATA.
        holds: the files expected in it, for the message.

    Raises:
        FileNotFoundError: neither `root` nor PIPEBENCH_DATA is given.
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
    """Return a folder in the user's cache, which is `pipebench` in XDG_CACHE_HOME or ~/.cache; it needn't exist.

    For a user without a home, as in a container, the folder can't be made. Nothing is cached then.
    """
    base, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    return Path(base or os.path.join(os.devnull if home == "~" else home, ".cache"), "pipebench", *parts)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, so that no reader sees half of it.

    Raises:
        OSError: the folder can't be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, content)
