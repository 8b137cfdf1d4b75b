"""The order in which an asynchronous server applies pushes, the only result that depends on the clock.

A worker pulls the weights after its own push, so the order determines every minibatch's version. It is recorded with a
run; a run given the same order computes the same weights.
"""

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np

from pipebench.typed_json import Count, Within

FILE_NAME = "push-order.json"
VERSION = 1


@dataclass
class Pushes:
    """Pushes between two drains, in the order in which they were applied: one update each."""

    first: int  # the segment's first minibatch in the run
    minibatches: list[int] = field(default_factory=list)  # numbered since the drain
    versions: list[int] = field(default_factory=list)  # of each gradient: updates since the drain

    def add(self, minibatch: int, version: int) -> None:
        """Record an update."""
        self.minibatches.append(minibatch)
        self.versions.append(version)

    @property
    def staleness(self) -> list[int]:
        """Updates between every minibatch's pull and its push, in order of the pushes."""
        return [made - version for made, version in enumerate(self.versions)]


@dataclass(frozen=True)
class PackedPushes:
    """Pushes between two drains as checkpoints keep them: less than a byte each, as workers mostly take turns."""

    first: Count
    # Base64 of zlib of int32: by how much every minibatch's number is above that of the push before, then staleness
    packed: str | None = None
    minibatches: list[int] = field(default_factory=list)  # as by `Pushes`, in early checkpoints
    versions: list[int] = field(default_factory=list)

    @staticmethod
    def of(pushes: Pushes) -> "PackedPushes":
        """Pack the pushes of a segment."""
        rows = np.array([np.diff(pushes.minibatches, prepend=0), pushes.staleness], dtype="<i4")
        return PackedPushes(pushes.first, base64.b64encode(zlib.compress(rows.tobytes())).decode())

    def unpacked(self) -> Pushes:
        """Return the pushes; raise a ValueError if they can't be unpacked."""
        if self.packed is None:
            return Pushes(self.first, self.minibatches, self.versions)
        try:
            steps, staleness = np.frombuffer(zlib.decompress(base64.b64decode(self.packed)), "<i4").reshape(2, -1)
        except (zlib.error, ValueError) as error:
            raise ValueError(f"packed pushes can't be read: {error}") from error
        versions = np.arange(len(staleness)) - staleness
        return Pushes(self.first, np.cumsum(steps).tolist(), versions.tolist())


def unpacked(counted: Iterable[Mapping[str, Any]]) -> list[Pushes]:
    """Return the pushes of every segment in servers' counters."""
    return [PackedPushes(**segment).unpacked() for segment in counted]


def histogram(segments: Iterable[Pushes]) -> dict[int, int]:
    """Return the number of minibatches by staleness."""
    counts = Counter(updates for pushes in segments for updates in pushes.staleness)
    return dict(sorted(counts.items()))


@dataclass
class PushOrder:
    """The file: its format version, and every segment between two drains."""

    pipebench_push_order: Annotated[int, Within(VERSION, VERSION, str(VERSION))]
    segments: list[Pushes]


def to_text(segments: Sequence[Pushes]) -> str:
    """Return the order as JSON."""
    return json.dumps(asdict(PushOrder(VERSION, list(segments))))


def metrics(counted: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the staleness metrics of the segments in servers' counters."""
    staleness = [updates for pushes in unpacked(counted) for updates in pushes.staleness]
    return {"staleness_mean": sum(staleness) / len(staleness), "staleness_max": max(staleness)} if staleness else {}


def fields(counted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result's field that holds them."""
    return {"pushes": tuple(unpacked(counted))}


class Turns:
    """Decides whose push is applied next: the first to arrive, or the next in a given order of minibatches.

    `order` and `limit`, the known number of the segment's minibatches, count from the drain; later ones never come.
    """

    def __init__(self, order: Sequence[int] | None = None, limit: Callable[[], float] = lambda: math.inf) -> None:
        self._limit = limit
        self._order = None if order is None else list(reversed(order))

    def next_of(self, there: Collection[int]) -> int | None:
        """Return which arrived minibatch to apply, or None to wait; `there` is in order of arrival."""
        if self._order is None:
            return next(iter(there), None)
        while self._order and self._order[-1] >= self._limit():
            self._order.pop()
        if not self._order:  # used up: this segment is longer
            return next(iter(there), None)
        if self._order[-1] not in there:
            return None
        return self._order.pop()
