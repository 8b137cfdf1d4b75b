"""What asynchronous data parallelism leaves to the clock: in which order the server applies what is pushed.

Everything else follows from it: a worker pulls what its own push has made, so the order says which version every
minibatch was computed with. It is kept with a run, and whoever is given it again computes the same weights.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

from pipebench.typed_json import Within

FILE_NAME = "push-order.json"
VERSION = 1


@dataclass
class Pushes:
    """What was pushed between two drains, in the order in which it was applied: one update each.

    Attributes:
        first: the minibatch of the run that the segment begins with.
        minibatches: what was pushed, numbered since the drain.
        versions: of the weights that each was computed with: updates since the drain.
    """

    first: int
    minibatches: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, minibatch: int, version: int) -> None:
        """Take note of an update."""
        self.minibatches.append(minibatch)
        self.versions.append(version)

    @property
    def staleness(self) -> list[int]:
        """Updates that were made between every minibatch's pull and its push, in order of the pushes."""
        return [made - version for made, version in enumerate(self.versions)]


def histogram(segments: Iterable[Pushes]) -> dict[int, int]:
    """Return how many minibatches were how stale, by staleness."""
    counts = Counter(updates for pushes in segments for updates in pushes.staleness)
    return dict(sorted(counts.items()))


@dataclass
class PushOrder:
    """The file that keeps it: the version of its form, and every segment between two drains."""

    pipebench_push_order: Annotated[int, Within(VERSION, VERSION, str(VERSION))]
    segments: list[Pushes]


def to_text(segments: Sequence[Pushes]) -> str:
    """Return the order as JSON."""
    return json.dumps(asdict(PushOrder(VERSION, list(segments))))


class Turns:
    """Whose push is applied next: the first that has come, or the one whose turn it is in a given order.

    Args:
        order: minibatches since the drain; None takes them as they come.
        limit: tells how many minibatches of the segment will run, as far as is known: what a given order has beyond
            never comes.
    """

    def __init__(self, order: Sequence[int] | None = None, limit: Callable[[], float] = lambda: math.inf) -> None:
        self._limit = limit
        self._order = None if order is None else list(reversed(order))

    def next_of(self, there: Collection[int]) -> int | None:
        """Return the minibatch to apply of those that are there, in the order in which they came; None waits."""
        if self._order is None:
            return next(iter(there), None)
        while self._order and self._order[-1] >= self._limit():
            self._order.pop()
        if not self._order:  # used up, in a segment that is longer than the one it was of
            return next(iter(there), None)
        if self._order[-1] not in there:
            return None
        return self._order.pop()
