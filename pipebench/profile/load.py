"""Reads profile files: pipebench's JSON and the PipeDream artifact's `graph.txt`."""

import re
from pathlib import Path

from pipebench.errors import ProfileError
from pipebench.files import FileError, read_text
from pipebench.profile.graph_txt import read_graph_txt
from pipebench.profile.model import Profile
from pipebench.profile.stored import read_profile


def load_profile(path: str | Path, num_samples: int = 1) -> Profile:
    """Read a profile file: pipebench's JSON if its content begins with `{` or it ends in .json, else a `graph.txt`.

    `num_samples` is the minibatch size of a `graph.txt`, which doesn't state it.

    Raises:
        ProfileError: the file is missing or isn't a valid profile; names the file and the place in it.
    """
    try:
        text = read_text(path)
    except FileError as error:
        raise ProfileError(f"profile {path} {error.problem}") from error
    if not text.lstrip().startswith("{") and Path(path).suffix != ".json":
        return read_graph_txt(text, str(path), num_samples)
    try:
        return read_profile(text)
    except ProfileError as error:
        raise ProfileError(f"profile {path}: {error}") from error


def plain_name(path: Path) -> str:
    """Return a profile file's name without the endings that mark it as a profile.

    >>> plain_name(Path("a/vgg.profile.json")), plain_name(Path("gnmt8.graph.txt")), plain_name(Path("graph.txt"))
    ('vgg', 'gnmt8', 'graph')
    """
    return re.sub(r"(?<=.)\.(profile|graph)$", "", path.stem)
