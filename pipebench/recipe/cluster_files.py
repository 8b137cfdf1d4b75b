"""Reads cluster files, which may extend each other key by key and level by level. Each value keeps its file's name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipebench.errors import Fault, RecipeError, nearest, shown
from pipebench.recipe.catalog import display, find_cluster
from pipebench.recipe.yaml_file import chain

LEVELS = "levels"
KEYS = ("device", "memory", "pcie", "host_memory", "launch", "pause", LEVELS, "max_servers", "all_reduce")
LEVEL_KEYS = (
    "name", "count", "bandwidth", "latency", "efficiency", "host_copy", "flow", "ring", "stage_ring", "p2p",
    "connections", "over_pcie",
)  # fmt: skip


class Given(NamedTuple):
    """The value of a key, and where it is written."""

    value: object  # as written; None if no file has the key
    file: str  # its name in messages
    key: str  # the full key in that file, such as `levels.0.latency`


@dataclass
class Keys:
    """The keys of a cluster, or of one of its levels."""

    file: str  # the last file that has any of them
    prefix: str = ""  # of their full keys in that file, such as `levels.0.`
    given: dict[str, Given] = field(default_factory=dict)

    def at(self, key: str) -> Given:
        """Return the value of a key."""
        return self.given.get(key) or Given(None, self.file, self.prefix + key)

    def add(self, data: Mapping[Any, Any], file: str, prefix: str) -> None:
        """Let the values of a file replace those of the files before."""
        self.file, self.prefix = file, prefix
        self.given |= {str(key): Given(value, file, f"{prefix}{key}") for key, value in data.items()}


@dataclass(frozen=True)
class ClusterFiles:
    """The keys of a cluster and of its levels, with values that aren't parsed yet; all keys are known ones."""

    keys: Keys
    levels: tuple[Keys, ...]


def cluster_files(path: Path) -> ClusterFiles:
    """Return the keys of a cluster's file merged with those of the files it extends.

    Raises:
        RecipeError: a file can't be read, has unknown keys, or levels that the extended file hasn't.
    """
    faults: list[Fault] = []
    keys = Keys(display(path))
    levels: dict[str, Keys] = {}
    for index, (each, data) in enumerate(chain(path, "cluster", find_cluster)):
        is_base = index == 0  # which has all levels; the others change some
        file = display(each)
        if "model" in data:
            raise RecipeError([Fault(file, "", "is a recipe, not a cluster: see `pipebench ls clusters`")])
        faults += _unknown(data, "", KEYS, file)
        own = data.pop(LEVELS, None if is_base else [])
        keys.add(data, file, "")
        if not isinstance(own, list) or (is_base and not own) or not all(isinstance(level, dict) for level in own):
            problem = f"got {shown(own)}, allowed is a list of levels, innermost first"
            raise RecipeError([*faults, Fault(file, LEVELS, problem)])
        faults += _add_levels(own, levels, None if is_base else [*levels], file)
    if faults:
        raise RecipeError(faults)
    return ClusterFiles(keys, tuple(levels.values()))


def _add_levels(
    own: list[dict[Any, Any]], levels: dict[str, Keys], extended: Sequence[str] | None, file: str
) -> list[Fault]:
    """Merge a file's own levels over `levels`; return the faults. `extended` is as in `_problem`."""
    faults: list[Fault] = []
    named: set[str] = set()
    for index, level in enumerate(own):
        prefix = f"{LEVELS}.{index}."
        name = level.get("name")
        faults += _unknown(level, prefix, LEVEL_KEYS, file)
        if problem := _problem(name, named, extended):
            faults.append(Fault(file, f"{prefix}name", problem))
            continue
        named.add(str(name))
        levels.setdefault(str(name), Keys(file)).add(level, file, prefix)
    return faults


def _problem(name: object, named: set[str], extended: Sequence[str] | None) -> str:
    """Return what is wrong with a level's name, or "".

    Args:
        name: as written.
        named: names of the levels before it in the same file.
        extended: names of the levels of the extended files; None in a file that extends none.
    """
    if not isinstance(name, str) or not name:
        return f"got {shown(name)}, allowed is a word such as server"
    if name in named:
        return f"got {shown(name)}, which is the name of a level before it; every level has one of its own"
    if extended is not None and name not in extended:
        hint = nearest(name[:60], extended)
        return f"got {shown(name)}, allowed are the levels that are extended: {', '.join(extended)}{hint}"
    return ""


def _unknown(data: Mapping[Any, Any], prefix: str, allowed: tuple[str, ...], file: str) -> list[Fault]:
    unknown = [str(name)[:60] for name in data if name not in allowed]
    return [
        Fault(file, f"{prefix}{name!r}", f"unknown key, allowed are {', '.join(allowed)}{nearest(name, allowed)}")
        for name in unknown
    ]
