"""Fitted constants of clusters: where they are in a cluster's file, their bounds, and writing them.

Constants are rates of links and host times of devices. A cluster's file holds one number per line (`ring: {value: 2.7
GB/s, calibrated: "on ..."}`), so one can be rewritten without changing any other line.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipebench.cluster import Cluster
from pipebench.errors import UserError, choice
from pipebench.files import replace as replace_file
from pipebench.recipe.catalog import display, find_cluster
from pipebench.recipe.clusters import load_cluster
from pipebench.report.definition import Constant
from pipebench.units import UnitError, parse_bandwidth, parse_duration

# Attribute of each key: rates of a level, times of the cluster.
_OF_LEVELS: Mapping[str, str] = {
    "bandwidth": "bandwidth_bytes_per_s",
    "host_copy": "host_copy_bytes_per_s",
    "flow": "flow_bytes_per_s",
    "ring": "ring_bytes_per_s",
    "stage_ring": "stage_ring_bytes_per_s",
    "p2p": "p2p_bytes_per_s",
}
_OF_CLUSTERS: Mapping[str, str] = {"launch": "launch_s", "pause": "pause_s"}
_FORM = f"levels.NAME.KEY, {', '.join(_OF_CLUSTERS)}"
_DIGITS = 3


@dataclass(frozen=True)
class ConstantSite:
    """The place of a constant in a cluster's file."""

    constant: Constant
    path: Path  # the cluster's file
    level: str  # name of the level; "" for a key of the cluster itself
    key: str  # of the level, one of bandwidth, host_copy, flow, ring, stage_ring, p2p; of the cluster, launch or pause
    low: float  # smallest allowed value [bytes/s or s]
    high: float  # likewise, largest
    value: float  # at present

    @property
    def cluster(self) -> str:
        """The cluster's short name."""
        return self.path.stem

    @property
    def shown_key(self) -> str:
        """Level and key for display."""
        return f"{self.level}.{self.key}" if self.level else self.key

    def text(self, value: float) -> str:
        """Format a value as in a cluster's file."""
        return f"{value / 1e9:.{_DIGITS}g} GB/s" if self.level else f"{value * 1e6:.{_DIGITS}g} us"


def find_place(constant: Constant, folder: Path) -> ConstantSite:
    """Locate a constant; paths of clusters are looked up in `folder`, the report's, first.

    Raises:
        UserError: there is nothing to fit.
    """
    path = find_cluster(constant.cluster, folder)
    cluster = load_cluster(str(path), 1)
    level, key = _level_and_key(constant, cluster)
    if _line(path.read_text(encoding="utf-8").splitlines(), level, key) is None:
        where = f" at level {level}" if level else ""
        problem = f"{display(path)} has no line {key}: {{value: ..., ...}} of its own{where}"
        raise _wrong(constant, "key", problem)
    parse: Callable[[object], float] = parse_bandwidth if level else parse_duration
    try:
        low, high = parse(constant.low), parse(constant.high)
    except UnitError as error:
        raise _wrong(constant, "from, to", str(error)) from error
    place = ConstantSite(constant, path, level, key, low, high, _value(cluster, level, key))
    if not 0 < low <= place.value <= high or low == high:
        what = f"got {constant.low} to {constant.high}, needed are two numbers above 0 around {place.text(place.value)}"
        raise _wrong(constant, "from, to", what)
    return place


def _level_and_key(constant: Constant, cluster: Cluster) -> tuple[str, str]:
    """Return the level ("" for the cluster itself) and the key within it that a constant names."""
    if constant.key in _OF_CLUSTERS:
        return "", constant.key
    parts = constant.key.split(".")
    if len(parts) != 3 or parts[0] != "levels":
        raise _wrong(constant, "key", f"got {constant.key[:60]!r}, allowed is {_FORM}")
    _, level, key = parts
    if key not in _OF_LEVELS:
        raise _wrong(constant, "key", choice(key[:60], _OF_LEVELS))
    names = [each.name for each in cluster.levels]
    if level not in names:
        raise _wrong(constant, "key", choice(level[:60], names))
    return level, key


def _value(cluster: Cluster, level: str, key: str) -> float:
    if not level:
        return float(getattr(cluster, _OF_CLUSTERS[key]))
    return float(next(getattr(each, _OF_LEVELS[key]) for each in cluster.levels if each.name == level))


def with_values(cluster: Cluster, places: Sequence[ConstantSite], values: Mapping[str, float]) -> Cluster:
    """Return a cluster with its constants set to `values`, by constant's name [bytes/s or s]."""
    levels, own = {level.name: level for level in cluster.levels}, dict[str, Any]()
    for place in places:
        if place.cluster != cluster.name:
            continue
        value = values[place.constant.name]
        if place.level:
            given: dict[str, Any] = {_OF_LEVELS[place.key]: value}
            levels[place.level] = replace(levels[place.level], **given)
        else:
            own[_OF_CLUSTERS[place.key]] = value
    return replace(cluster, levels=tuple(levels.values()), **own)


def write_value(place: ConstantSite, value: float, report: str) -> None:
    """Write a constant [bytes/s or s] and its fitted cells into its cluster's file; every other line stays.

    Raises:
        UserError: the file can't be written.
    """
    lines = place.path.read_text(encoding="utf-8").splitlines(keepends=True)
    found = _line(lines, place.level, place.key)
    assert found is not None  # `find_place` has found it
    index, match = found
    what = re.search(r'"[^"]*?: (.*)"\}', match["rest"])  # the description follows the first colon
    cells = ", ".join(f"{row}.{measure}" for row, measure in place.constant.fitted_on)
    source = json.dumps(f"on {cells} of {report}" + (f": {what[1]}" if what else ""), ensure_ascii=False)
    lines[index] = f"{match['head']}{{value: {place.text(value)}, calibrated: {source}}}\n"
    try:
        replace_file(place.path, "".join(lines).encode())
    except OSError as error:
        raise UserError(f"{display(place.path)} can't be written: {error.strerror}") from error


def _line(lines: Sequence[str], level: str, key: str) -> tuple[int, re.Match[str]] | None:
    """Return index and match of a key's line in a level, or before all levels if `level` is ""."""
    inside = not level
    for index, line in enumerate(lines):
        name = re.match(r"\s*- name: (\S+)", line)
        if name:
            inside = name[1] == level
        match = re.match(rf"(?P<head>[\s-]*{key}: )(?P<rest>\{{value: .*\}})\s*$", line)
        if inside and match:
            return index, match
    return None


def _wrong(constant: Constant, key: str, problem: str) -> UserError:
    return UserError(f"calibration.constants.{constant.name}.{key}: {problem}")
