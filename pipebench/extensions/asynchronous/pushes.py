"""The order in which an asynchronous server applies pushes: all that makes its training depend on the clock.

A worker pulls the weights right after its own push, so this order determines the version that every minibatch reads.
The order is recorded with a run; a run given the same order computes the same weights.
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
    """The pushes between two drains, in the order in which they were applied: one update each."""

    first: int  # the run's minibatches before the first of these
    minibatches: list[int] = field(default_factory=list)  # counted from the drain
    versions: list[int] = field(default_factory=list)  # that gradients were computed with: updates since the drain

    def add(self, minibatch: int, version: int) -> None:
        """Record an update."""
        self.minibatches.append(minibatch)
        self.versions.append(version)

    @property
    def staleness(self) -> list[int]:
        """For every push, the updates made since the weights of its gradient."""
        return [made - version for made, version in enumerate(self.versions)]


@dataclass(frozen=True)
class PackedPushes:
    """The pushes between two drains as checkpoints store them: less than a byte each, as workers mostly take turns."""

    first: Count
    # Base64 of zlib of two rows of int32: the differences of successive minibatches, and the staleness
    packed: str | None = None
    minibatches: list[int] = field(default_factory=list)  # of `Pushes`, in checkpoints of earlier releases
    versions: list[int] = field(default_factory=list)

    @staticmethod
    def of(pushes: Pushes) -> "PackedPushes":
        """Pack the pushes of a segment."""
        rows = np.array([np.diff(pushes.minibatches, prepend=0), pushes.staleness], dtype="<i4")
        return PackedPushes(pushes.first, base64.b64encode(zlib.compress(rows.tobytes())).decode())

    def unpacked(self) -> Pushes:
        """Return the pushes.

        Raises:
            ValueError: they can't be unpacked.
        """
        if self.packed is None:
            return Pushes(self.first, self.minibatches, self.versions)
        try:
            steps, staleness = np.frombuffer(zlib.decompress(base64.b64decode(self.packed)), "<i4").reshape(2, -1)
        except (zlib.error, ValueError) as error:
            raise ValueError(f"packed pushes can't be read: {error}") from error
        versions = np.arange(len(staleness)) - staleness
        return Pushes(self.first, np.cumsum(steps).tolist(), versions.tolist())


def unpacked(counted: Iterable[Mapping[str, Any]]) -> list[Pushes]:
    """Return the pushes of every segment in what `Server.facts` has returned."""
    return [PackedPushes(**segment).unpacked() for segment in counted]


def histogram(segments: Iterable[Pushes]) -> dict[int, int]:
    """Return the number of minibatches by staleness."""
    counts = Counter(updates for pushes in segments for updates in pushes.staleness)
    return dict(sorted(counts.items()))


@dataclass
class PushOrder:
    """The file `push-order.json`: its format version, and every segment between two drains."""

    pipebench_push_order: Annotated[int, Within(VERSION, VERSION, str(VERSION))]
    segments: list[Pushes]


def to_text(segments: Sequence[Pushes]) -> str:
    """Return the content of a file `push-order.json`."""
    return json.dumps(asdict(PushOrder(VERSION, list(segments))))


def metrics(counted: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of staleness in what `Server.facts` has returned."""
    staleness = [updates for pushes in unpacked(counted) for updates in pushes.staleness]
    return {"staleness_mean": sum(staleness) / len(staleness), "staleness_max": max(staleness)} if staleness else {}


def fields(counted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the field of a run's result that has the pushes."""
    return {"pushes": tuple(unpacked(counted))}


class Turns:
    """Decides which push is applied next: the first to arrive, or the next in a given order.

    Args:
        order: minibatches, counted from the drain; None for the order of arrival.
        limit: returns the length of the segment as far as it is known: minibatches from there on never come.
    """

    def __init__(self, order: Sequence[int] | None = None, limit: Callable[[], float] = lambda: math.inf) -> None:
        self._limit = limit
        self._order = None if order is None else list(reversed(order))

    def next_of(self, there: Collection[int]) -> int | None:
        """Return which of the minibatches that have arrived, in this order, to apply next; None: wait."""
        if self._order is None:
            return next(iter(there), None)
        while self._order and self._order[-1] >= self._limit():
            self._order.pop()
        if not self._order:  # used up, since this segment is longer than the recorded one
            return next(iter(there), None)
        if self._order[-1] not in there:
            return None
        return self._order.pop()
