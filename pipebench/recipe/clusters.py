"""Makes clusters of their files, in which each number states its source: published, assumed, measured or calibrated."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipebench.cluster import ALL_REDUCES, CONNECTIONS, LOCAL, Cluster, Level
from pipebench.errors import Fault, RecipeError, choice, shown
from pipebench.recipe.catalog import display, find_cluster, summary
from pipebench.recipe.cluster_files import KEYS, LEVEL_KEYS, LEVELS, Given, Keys, cluster_files
from pipebench.recipe.typecheck import problem_with
from pipebench.recipe.yaml_file import to_yaml
from pipebench.units import UnitError, parse_bandwidth, parse_bytes, parse_duration

MAX_WORKERS = 4096  # a straight plan lists every worker; the papers' largest cluster has 256
CHANGED = "cluster."  # begins the key of a fault in a number that the recipe gives instead of the file
SERVERS = "servers"  # the key of the fault if only the number of servers is wrong
# Kinds of sources, and what the text of each says.
SOURCES = {"published": "where", "assumed": "why", "measured": "how", "calibrated": "on what"}
_FORM = " or ".join(f"{{value: ..., {source}: {word}}}" for source, word in SOURCES.items())


_Parse = Callable[[Any], Any]


def _typed(kind: type, allowed: str, low: float = -math.inf, high: float = math.inf) -> _Parse:
    """Return a parser of values of a type from `low` to `high`; for texts, these limit the length."""

    def read(value: Any) -> Any:
        if problem_with(value, kind) or not low <= (len(value) if kind is str else value) <= high:
            raise UnitError(f"got {shown(value)}, allowed is {allowed}")
        return kind(value)

    return read


def _one_of(allowed: Sequence[str]) -> _Parse:
    """Return a parser of one of some words."""

    def read(value: object) -> object:
        if value not in allowed:
            raise UnitError(choice(value, allowed))
        return value

    return read


# Key of a cluster's file, or of one of its levels, to the attribute of `Cluster` or `Level` and its parser.
_CLUSTER: Mapping[str, tuple[str, _Parse]] = {
    "device": ("device", _typed(str, "a name", low=1)),
    "memory": ("memory_bytes", lambda value: None if value is None else parse_bytes(value)),
    "pcie": ("pcie_bytes_per_s", parse_bandwidth),
    "host_memory": ("host_memory_bytes", parse_bytes),
    "launch": ("launch_s", parse_duration),
    "pause": ("pause_s", parse_duration),
    "all_reduce": ("all_reduce", _one_of(ALL_REDUCES)),
}
_LEVEL: Mapping[str, tuple[str, _Parse]] = {
    "count": ("count", _typed(int, f"a whole number from 1 to {MAX_WORKERS}", 1, MAX_WORKERS)),
    "bandwidth": ("bandwidth_bytes_per_s", parse_bandwidth),
    "latency": ("latency_s", parse_duration),
    "efficiency": ("efficiency", _typed(float, "a number above 0, at most 1", 5e-324, 1)),
    **{name: (f"{name}_bytes_per_s", parse_bandwidth) for name in ("host_copy", "flow", "ring", "stage_ring", "p2p")},
    "connections": ("connections", _one_of(CONNECTIONS)),
    "over_pcie": ("over_pcie", _typed(bool, "true or false")),
}
# Required keys of a cluster and its levels, besides names.
NEEDED = {"device", "memory", "count", "bandwidth", "latency"}


def load_cluster(
    name: str, servers: int, beside: Path | None = None, changes: Mapping[str, Any] = MappingProxyType({})
) -> Cluster:
    """Return a cluster by its name.

    Args:
        name: a short name such as `cluster-a`, or the path of a YAML file.
        servers: the count of the outermost level is multiplied by this; at least 1.
        beside: the folder where a path is searched first.
        changes: numbers instead of the file's, as in `ClusterRecipe.changes`.

    Raises:
        RecipeError: there is no such file, it isn't a cluster, it can't have so many servers, or a change can't be read
            (the keys of such faults begin with CHANGED).
    """
    path = find_cluster(name, beside)
    files = cluster_files(path)
    faults: list[Fault] = []
    made = _values(files.keys, _CLUSTER, faults)
    for given in (files.keys.at("launch"), files.keys.at("pause")):
        if given.value is not None and made["device"] == LOCAL:
            problem = "is measured where the device is local, this machine's: leave it out"
            faults.append(Fault(given.file, given.key, problem))
    found = [(str(each.at("name").value), _values(each, _LEVEL, faults)) for each in files.levels]
    most, file, key = files.keys.at("max_servers")
    if most is not None and not (type(most) is int and most >= 1):
        faults.append(Fault(file, key, f"got {shown(most)}, allowed is a whole number of at least 1"))
    own = {key: _parsed(key, value, faults) for key, value in changes.items()}
    if faults:
        raise RecipeError(faults)
    if "count" in own:
        found[0][1]["count"] = own["count"]
    levels = tuple(Level(name, **values) for name, values in found)
    _check_servers(servers, most if isinstance(most, int) else None, levels, display(path))
    if "memory" in own:
        made["memory_bytes"] = own["memory"]
    return Cluster(path.stem, levels=_grown(levels, servers, own), **made)


def _grown(levels: Sequence[Level], servers: int, own: Mapping[str, Any]) -> tuple[Level, ...]:
    """Return levels with `servers` times the count of the outermost one, and with a recipe's own rates.

    These are the rates of the outermost level that joins several components.
    """
    grown = [*levels[:-1], replace(levels[-1], count=levels[-1].count * servers)]
    joining = max((index for index, level in enumerate(grown) if level.count > 1), default=0)
    rates = {_LEVEL[key][0]: own[key] for key in ("bandwidth", "latency") if key in own}
    grown[joining] = replace(grown[joining], **rates)
    return tuple(grown)


def _parsed(key: str, value: Any, faults: list[Fault]) -> Any:
    """Return the parsed value of a recipe's key that replaces the file's; None, and a fault, if it can't be read."""
    try:
        return {**_LEVEL, **_CLUSTER}[key][1](value)
    except UnitError as error:
        faults.append(Fault("", f"{CHANGED}{key}", str(error)))
        return None


def as_text(path: Path) -> str:
    """Return a cluster as the text of one file, with the files that it extends, and every number's source.

    Raises:
        RecipeError: the files aren't those of a cluster.
    """
    load_cluster(str(path), 1)
    files = cluster_files(path)
    levels = [_given(level, LEVEL_KEYS) for level in files.levels]
    return f"# {summary(path)}\n{to_yaml({**_given(files.keys, KEYS), LEVELS: levels})}"


def _given(keys: Keys, names: Sequence[str]) -> dict[str, object]:
    return {name: value for name in names if (value := keys.at(name).value) is not None}


def sources(path: Path) -> str:
    """Return how many of a cluster's numbers have each kind of source: `numbers: 7 published, 5 assumed`."""
    files = cluster_files(path)
    given = [each.value for keys in (files.keys, *files.levels) for each in keys.given.values()]
    found = Counter(source for value in given if isinstance(value, dict) for source in SOURCES if source in value)
    return "numbers: " + ", ".join(f"{found[source]} {source}" for source in SOURCES if found[source])


def _values(keys: Keys, table: Mapping[str, tuple[str, _Parse]], faults: list[Fault]) -> dict[str, Any]:
    """Return the values of required and given keys by attribute."""
    return {
        attribute: _value(keys.at(key), parse, faults)
        for key, (attribute, parse) in table.items()
        if key in NEEDED or keys.at(key).value is not None
    }


def _value(given: Given, parse: _Parse, faults: list[Fault]) -> Any:
    """Return the parsed value of a key; None, and a fault, if it has no source or can't be read."""
    value, file, key = given
    sources = [name for name in SOURCES if name in value] if isinstance(value, dict) else []
    if not isinstance(value, dict) or "value" not in value or len(value) != 2 or len(sources) != 1:
        problem = "is missing" if value is None else f"got {shown(value)}"
        faults.append(Fault(file, key, f"{problem}, needed is {_FORM}"))
        return None
    if not isinstance(value[sources[0]], str) or not value[sources[0]].strip():
        faults.append(Fault(file, f"{key}.{sources[0]}", "got nothing readable, needed is a sentence"))
    try:
        return parse(value["value"])
    except UnitError as error:
        faults.append(Fault(file, f"{key}.value", str(error)))
        return None


def _check_servers(servers: int, most: int | None, levels: tuple[Level, ...], file: str) -> None:
    workers_each = Cluster("", "", None, levels).num_workers
    largest = min(most or MAX_WORKERS, MAX_WORKERS // workers_each)
    if not 1 <= servers <= largest:
        allowed = f"are 1 to {largest} servers" if largest > 1 else "is the 1 server"
        raise RecipeError([Fault(file, SERVERS, f"got {servers}, allowed {allowed} of this cluster")])
