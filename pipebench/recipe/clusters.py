"""Read a cluster's YAML file; each of its numbers says where it comes from: published, assumed or calibrated."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pipebench.cluster import ALL_REDUCES, CONNECTIONS, LOCAL, PER_PAIR, RING, Cluster, Level
from pipebench.errors import Fault, RecipeError, nearest
from pipebench.recipe.catalog import display, find_cluster, summary
from pipebench.recipe.cluster_files import KEYS, LEVEL_KEYS, Given, Keys, cluster_files
from pipebench.recipe.typecheck import problem_with, shown
from pipebench.units import UnitError, parse_bandwidth, parse_bytes, parse_duration

MAX_WORKERS = 4096  # a straight plan lists every worker; the papers' largest cluster has 256
SERVERS = "servers"  # the key of the fault when only the number of servers is wrong
SOURCES = {"published": "where", "assumed": "why", "calibrated": "on what"}  # of a number, and what says so
_FORM = " or ".join(f"{{value: ..., {source}: {word}}}" for source, word in SOURCES.items())
_T = TypeVar("_T")


@dataclass
class _Reader:
    """Reads keys and collects what is wrong."""

    faults: list[Fault] = field(default_factory=list)

    def quantity(self, given: Given, read: Callable[[Any], _T]) -> _T | None:
        """Return the value of a key, which must name its source."""
        value, file, key = given
        sources = [name for name in SOURCES if name in value] if isinstance(value, dict) else []
        if not isinstance(value, dict) or "value" not in value or len(value) != 2 or len(sources) != 1:
            problem = "is missing" if value is None else f"got {shown(value)}"
            self.faults.append(Fault(file, key, f"{problem}, needed is {_FORM}"))
            return None
        if not isinstance(value[sources[0]], str) or not value[sources[0]].strip():
            self.faults.append(Fault(file, f"{key}.{sources[0]}", "got nothing readable, needed is a sentence"))
        try:
            return read(value["value"])
        except UnitError as error:
            self.faults.append(Fault(file, f"{key}.value", str(error)))
            return None

    def optional(self, given: Given, read: Callable[[Any], _T], default: _T) -> _T | None:
        """Return likewise, or the default where no file has the key."""
        return default if given.value is None else self.quantity(given, read)


def load_cluster(name: str, servers: int, beside: Path | None = None) -> Cluster:
    """Return a cluster with so many components of its outermost level.

    Args:
        name: short name such as `cluster-a`, or the path of a YAML file.
        servers: at least 1; multiplies the outermost level and no other.
        beside: folder that a relative path is seen from first.

    Raises:
        RecipeError: the file isn't there or isn't a cluster, or there can't be so many servers.
    """
    path = find_cluster(name, beside)
    files = cluster_files(path)
    reader, keys = _Reader(), files.keys
    device = reader.quantity(keys.at("device"), _text)
    memory = reader.quantity(keys.at("memory"), lambda value: None if value is None else parse_bytes(value))
    pcie = reader.optional(keys.at("pcie"), parse_bandwidth, None)
    host_memory = reader.optional(keys.at("host_memory"), parse_bytes, None)
    launch, pause = (reader.optional(keys.at(name), parse_duration, None) for name in ("launch", "pause"))
    for given in (keys.at("launch"), keys.at("pause")):
        if given.value is not None and device == LOCAL:
            problem = "what this machine takes is measured, so a cluster whose device is local can't say it"
            reader.faults.append(Fault(given.file, given.key, problem))
    all_reduce = reader.optional(keys.at("all_reduce"), _one_of(ALL_REDUCES), RING)
    levels = tuple(level for level in (_level(each, reader) for each in files.levels) if level is not None)
    most, file, key = keys.at("max_servers")
    if most is not None and (problem_with(most, int) or not isinstance(most, int) or most < 1):
        problem = f"got {shown(most)}, allowed is a whole number of at least 1"
        reader.faults.append(Fault(file, key, problem))
    if reader.faults or device is None or all_reduce is None or not (most is None or isinstance(most, int)):
        raise RecipeError(reader.faults)
    _check_servers(servers, most, levels, display(path))
    outermost = levels[-1]
    grown = replace(outermost, count=outermost.count * servers)
    return Cluster(path.stem, device, memory, (*levels[:-1], grown), all_reduce, pcie, host_memory, launch, pause)


def as_text(path: Path) -> str:
    """Return a cluster as a file of its own: what it extends filled in, every number with its source.

    Raises:
        RecipeError: the files aren't those of a cluster.
    """
    load_cluster(str(path), 1)
    files = cluster_files(path)
    lines = [f"# {summary(path)}", *_lines(files.keys, KEYS), "levels:"]
    for level in files.levels:
        first, *others = _lines(level, LEVEL_KEYS)
        lines += [f"  - {first}", *(f"    {line}" for line in others)]
    return "\n".join(lines) + "\n"


def _lines(keys: Keys, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        value = keys.at(name).value
        if isinstance(value, dict):
            plain = value["value"] is None or isinstance(value["value"], bool)
            given = json.dumps(value["value"]) if plain else value["value"]
            source = next(each for each in SOURCES if each in value)
            yield f"{name}: {{value: {given}, {source}: {json.dumps(value[source], ensure_ascii=False)}}}"
        elif value is not None:
            yield f"{name}: {value}"


def sources(path: Path) -> str:
    """Return how many of a cluster's numbers come from what: `7 published, 5 assumed`."""
    files = cluster_files(path)
    given = [each.value for keys in (files.keys, *files.levels) for each in keys.given.values()]
    found = Counter(source for value in given if isinstance(value, dict) for source in SOURCES if source in value)
    return ", ".join(f"{found[source]} {source}" for source in SOURCES if found[source])


def _level(keys: Keys, reader: _Reader) -> Level | None:
    count = reader.quantity(keys.at("count"), _count)
    bandwidth = reader.quantity(keys.at("bandwidth"), parse_bandwidth)
    latency = reader.quantity(keys.at("latency"), parse_duration)
    efficiency = reader.optional(keys.at("efficiency"), _fraction, 1.0)
    host_copy, flow, ring, p2p = (
        reader.optional(keys.at(name), parse_bandwidth, None) for name in ("host_copy", "flow", "ring", "p2p")
    )
    connections = reader.optional(keys.at("connections"), _one_of(CONNECTIONS), PER_PAIR)
    over_pcie = reader.optional(keys.at("over_pcie"), _yes_or_no, True)
    if count is None or bandwidth is None or latency is None or efficiency is None:
        return None
    if connections is None or over_pcie is None:
        return None
    name = str(keys.at("name").value)
    return Level(name, count, bandwidth, latency, efficiency, host_copy, flow, ring, p2p, connections, over_pcie)


def _check_servers(servers: int, most: int | None, levels: tuple[Level, ...], file: str) -> None:
    workers_each = Cluster("", "", None, levels).num_workers
    largest = min(most or MAX_WORKERS, MAX_WORKERS // workers_each)
    if not 1 <= servers <= largest:
        raise RecipeError([Fault(file, SERVERS, f"got {servers}, allowed are 1 to {largest} servers of this cluster")])


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UnitError(f"got {shown(value)}, allowed is a name")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_WORKERS:
        raise UnitError(f"got {shown(value)}, allowed is a whole number from 1 to {MAX_WORKERS}")
    return value


def _fraction(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise UnitError(f"got {shown(value)}, allowed is a number above 0, at most 1")
    return float(value)


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise UnitError(f"got {shown(value)}, allowed are true and false")
    return value


def _one_of(allowed: Sequence[str]) -> Callable[[object], str]:
    """Return what reads one of some words."""

    def read(value: object) -> str:
        if value not in allowed:
            hint = nearest(str(value)[:60], allowed)
            raise UnitError(f"got {shown(value)}, allowed are {', '.join(allowed)}{hint}")
        return str(value)

    return read
