"""Read a cluster's YAML file; each of its numbers says whether it is published or assumed, and where or why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pipebench.cluster import ALL_REDUCES, RING, Cluster, Level
from pipebench.errors import Fault, RecipeError, nearest
from pipebench.recipe.catalog import display, find_cluster
from pipebench.recipe.typecheck import problem_with, shown
from pipebench.recipe.yaml_file import read_mapping
from pipebench.units import UnitError, parse_bandwidth, parse_bytes, parse_duration

MAX_WORKERS = 4096  # a straight plan lists every worker; the papers' largest cluster has 256
SERVERS = "servers"  # the key of the fault when only the number of servers is wrong
_SOURCES = ("published", "assumed")
_T = TypeVar("_T")


@dataclass
class _Reader:
    """Reads keys of one cluster file and collects what is wrong."""

    file: str
    faults: list[Fault] = field(default_factory=list)

    def keys(self, data: Mapping[Any, Any], key: str, allowed: tuple[str, ...]) -> None:
        for name in data:
            if name not in allowed:
                hint = nearest(str(name)[:60], allowed)
                self.fault(f"{key}{str(name)[:60]!r}", f"unknown key, allowed are {', '.join(allowed)}{hint}")

    def quantity(self, data: Mapping[Any, Any], key: str, read: Callable[[Any], _T]) -> _T | None:
        """Return the value under a key such as `levels.0.latency`, which must name its source."""
        given = data.get(key.rpartition(".")[2])
        sources = [name for name in _SOURCES if name in given] if isinstance(given, dict) else []
        if not isinstance(given, dict) or "value" not in given or len(given) != 2 or len(sources) != 1:
            form = "{value: ..., published: where} or {value: ..., assumed: why}"
            self.fault(
                key, f"is missing, needed is {form}" if given is None else f"got {shown(given)}, needed is {form}"
            )
            return None
        if not isinstance(given[sources[0]], str) or not given[sources[0]].strip():
            self.fault(f"{key}.{sources[0]}", "got nothing readable, needed is a sentence")
        try:
            return read(given["value"])
        except UnitError as error:
            self.fault(f"{key}.value", str(error))
            return None

    def fault(self, key: str, problem: str) -> None:
        self.faults.append(Fault(self.file, key, problem))


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
    data = read_mapping(path)
    reader = _Reader(display(path))
    reader.keys(data, "", ("device", "memory", "levels", "max_servers", "all_reduce"))
    device = reader.quantity(data, "device", _text)
    memory = reader.quantity(data, "memory", lambda value: None if value is None else parse_bytes(value))
    all_reduce = reader.quantity(data, "all_reduce", _all_reduce) if "all_reduce" in data else RING
    levels = _levels(data.get("levels"), reader)
    most = data.get("max_servers")
    if most is not None and (problem_with(most, int) or most < 1):
        reader.fault("max_servers", f"got {shown(most)}, allowed is a whole number of at least 1")
    if reader.faults or device is None or all_reduce is None:
        raise RecipeError(reader.faults)
    _check_servers(servers, most, levels, display(path))
    outermost = levels[-1]
    grown = replace(outermost, count=outermost.count * servers)
    return Cluster(path.stem, device, memory, (*levels[:-1], grown), all_reduce)


def _levels(given: object, reader: _Reader) -> tuple[Level, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        reader.fault("levels", f"got {shown(given)}, allowed is a list of levels, innermost first")
        return ()
    levels = [_level(item, f"levels.{index}", reader) for index, item in enumerate(given)]
    return tuple(level for level in levels if level is not None)


def _level(data: Mapping[Any, Any], key: str, reader: _Reader) -> Level | None:
    reader.keys(data, f"{key}.", ("name", "count", "bandwidth", "latency", "efficiency", "host_copy"))
    name = data.get("name")
    if not isinstance(name, str) or not name:
        reader.fault(f"{key}.name", f"got {shown(name)}, allowed is a word such as server")
    count = reader.quantity(data, f"{key}.count", _count)
    bandwidth = reader.quantity(data, f"{key}.bandwidth", parse_bandwidth)
    latency = reader.quantity(data, f"{key}.latency", parse_duration)
    efficiency = reader.quantity(data, f"{key}.efficiency", _fraction) if "efficiency" in data else 1.0
    host_copy = reader.quantity(data, f"{key}.host_copy", parse_bandwidth) if "host_copy" in data else None
    if count is None or bandwidth is None or latency is None or efficiency is None:
        return None
    return Level(str(name), count, bandwidth, latency, efficiency, host_copy)


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


def _all_reduce(value: object) -> str:
    if value not in ALL_REDUCES:
        hint = nearest(str(value)[:60], ALL_REDUCES)
        raise UnitError(f"got {shown(value)}, allowed are {', '.join(ALL_REDUCES)}{hint}")
    return str(value)
