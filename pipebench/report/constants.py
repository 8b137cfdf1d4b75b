"""Constants of clusters that are fitted: where they stand in a cluster's file, what they are, and how they are written.

A cluster's file holds one number per line (`ring: {value: 2.7 GB/s, calibrated: "on ..."}`), so that a number and its
source can be written anew and every other line stays as a person wrote it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipebench.cluster import Cluster
from pipebench.errors import UserError, choice
from pipebench.files import replace as replace_file
from pipebench.recipe.catalog import display, find_cluster
from pipebench.recipe.clusters import load_cluster
from pipebench.report.definition import Constant
from pipebench.units import UnitError, parse_bandwidth

# Keys of a level to the attribute that they become; what can be fitted is a rate.
_ATTRIBUTES: Mapping[str, str] = {
    "bandwidth": "bandwidth_bytes_per_s",
    "host_copy": "host_copy_bytes_per_s",
    "flow": "flow_bytes_per_s",
    "ring": "ring_bytes_per_s",
    "p2p": "p2p_bytes_per_s",
}
_FORM = "levels.NAME.KEY"
_DIGITS = 3


@dataclass(frozen=True)
class Place:
    """Where a constant stands.

    Attributes:
        constant: as the report has it.
        path: the cluster's file.
        level: name of the level.
        key: of the level, one of bandwidth, host_copy, flow, ring, p2p.
        low: the least it may be [bytes/s].
        high: the most.
        value: what it is now.
    """

    constant: Constant
    path: Path
    level: str
    key: str
    low: float
    high: float
    value: float

    @property
    def cluster(self) -> str:
        """The cluster's short name."""
        return self.path.stem


def find_place(constant: Constant, folder: Path) -> Place:
    """Return where a constant stands.

    Args:
        constant: as the report has it.
        folder: the report's, from which a path of a cluster is seen first.

    Raises:
        UserError: nothing stands there that could be fitted; says what is wrong.
    """
    path = find_cluster(constant.cluster, folder)
    parts = constant.key.split(".")
    if len(parts) != 3 or parts[0] != "levels":
        raise _wrong(constant, "key", f"got {constant.key[:60]!r}, allowed is {_FORM}")
    _, level, key = parts
    if key not in _ATTRIBUTES:
        raise _wrong(constant, "key", choice(key[:60], _ATTRIBUTES))
    levels = {each.name: each for each in load_cluster(str(path), 1).levels}
    if level not in levels:
        raise _wrong(constant, "key", choice(level[:60], levels))
    if _line(path.read_text(encoding="utf-8").splitlines(), level, key) is None:
        problem = f"{display(path)} has no line {key}: {{value: ..., ...}} of its own at level {level}"
        raise _wrong(constant, "key", problem)
    value = getattr(levels[level], _ATTRIBUTES[key])
    try:
        low, high = parse_bandwidth(constant.low), parse_bandwidth(constant.high)
    except UnitError as error:
        raise _wrong(constant, "from, to", str(error)) from error
    if not low <= value <= high or low == high:
        raise _wrong(
            constant, "from, to", f"got {constant.low} to {constant.high}, needed are two rates around {_text(value)}"
        )
    return Place(constant, path, level, key, low, high, value)


def with_values(cluster: Cluster, places: Sequence[Place], values: Mapping[str, float]) -> Cluster:
    """Return a cluster with other constants, those of other clusters left aside.

    Args:
        cluster: the cluster.
        places: of the constants.
        values: by constant's name [bytes/s].
    """
    levels = {level.name: level for level in cluster.levels}
    for place in places:
        if place.cluster == cluster.name:
            value: dict[str, float] = {_ATTRIBUTES[place.key]: values[place.constant.name]}
            levels[place.level] = replace(levels[place.level], **value)  # type: ignore[arg-type] # all are rates
    return replace(cluster, levels=tuple(levels.values()))


def write_value(place: Place, value: float, report: str) -> None:
    """Write a constant into its cluster's file, with the cells that it was fitted on; nothing else changes.

    Args:
        place: where it stands.
        value: what it is now [bytes/s].
        report: name of the report.

    Raises:
        UserError: the file can't be written.
    """
    lines = place.path.read_text(encoding="utf-8").splitlines(keepends=True)
    found = _line(lines, place.level, place.key)
    assert found is not None  # `find_place` has found it
    index, match = found
    what = re.search(r'"[^"]*?: (.*)"\}', match["rest"])  # what comes after the first colon says what it is
    cells = ", ".join(f"{row}.{measure}" for row, measure in place.constant.fitted_on)
    source = json.dumps(f"on {cells} of {report}" + (f": {what[1]}" if what else ""), ensure_ascii=False)
    lines[index] = f"{match['head']}{{value: {_text(value)}, calibrated: {source}}}\n"
    try:
        replace_file(place.path, "".join(lines).encode())
    except OSError as error:
        raise UserError(f"{display(place.path)} can't be written: {error.strerror}") from error


def _line(lines: Sequence[str], level: str, key: str) -> tuple[int, re.Match[str]] | None:
    """Return the line of a level's key, with its index."""
    inside = False
    for index, line in enumerate(lines):
        name = re.match(r"\s*- name: (\S+)", line)
        if name:
            inside = name[1] == level
        match = re.match(rf"(?P<head>[\s-]*{key}: )(?P<rest>\{{value: .*\}})\s*$", line)
        if inside and match:
            return index, match
    return None


def _text(value: float) -> str:
    return f"{value / 1e9:.{_DIGITS}g} GB/s"


def _wrong(constant: Constant, key: str, problem: str) -> UserError:
    return UserError(f"calibration.constants.{constant.name}.{key}: {problem}")
