"""Our side: the distributed engine on a setup, in a process of a crew."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipebench.engine.setup import Setup

_MODULE = "pipebench.engine.distributed"


@dataclass
class Ours:
    """The engine of this process, which counts the minibatches it was given.

    Attributes:
        advance: trains minibatches from a number on, so many.
        sent_bytes: returns the payload this process has sent so far, by kind.
    """

    advance: Callable[[int, int], object]
    sent_bytes: Callable[[], Mapping[str, int]]
    _done: int = 0

    def train(self, num_minibatches: int) -> None:
        """Train on the next minibatches, and drain."""
        self.advance(self._done, num_minibatches)
        self._done += num_minibatches


def is_there() -> bool:
    """Return whether this pipebench has a distributed engine."""
    return importlib.util.find_spec(_MODULE) is not None


def make_ours(setup: Setup) -> Ours:
    """Make the engine of this process's worker; every process of the crew makes one of the same setup."""
    engine = importlib.import_module(_MODULE).DistributedEngine(setup)

    def sent_bytes() -> dict[str, int]:
        found: dict[str, int] = {}
        for (kind, _), num_bytes in engine.num_bytes.items():
            found[kind] = found.get(kind, 0) + num_bytes
        return found

    return Ours(engine.train, sent_bytes)
