"""What layers did while a run went on: from which minibatch on its stages were cut where, and why.

A run keeps it; whoever is given it again cuts at the same places from the same minibatches on, and computes the same
weights on any engine.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

from pipebench.typed_json import Amount, Count, Ordinal, Within

FILE_NAME = "moves.json"
VERSION = 1


@dataclass(frozen=True)
class RepartitionRecord:
    """New cuts, from a minibatch of a run on.

    Attributes:
        minibatch: of the run, from 0: the first that runs forward under them.
        cuts: first layer of every stage but the first.
        memory: policies of the layers that don't keep what they save, by name; None: every layer has the one it had.
        was: the cuts before.
        why: in words.
        live: whether training went on meanwhile; otherwise the pipeline was emptied first.
        samples: of the run before that minibatch.
        clock_s: the run's clock when the new cuts were there.
        stall_s: seconds for which nothing was computed since the pipeline was empty; 0 where training went on.
    """

    minibatch: Ordinal
    cuts: tuple[str, ...]
    memory: dict[str, str] | None = None
    was: tuple[str, ...] = ()
    why: str = "decided beforehand"
    live: bool = False
    samples: Count = 0
    clock_s: Amount = 0.0
    stall_s: Amount = 0.0


@dataclass
class RepartitionFile:
    """The file that keeps them: the version of its form, and all of a run, the first one first."""

    pipebench_moves: Annotated[int, Within(VERSION, VERSION, str(VERSION))]
    moves: list[RepartitionRecord] = field(default_factory=list)


def in_words(memory: Mapping[str, str] | None) -> str:
    """Return in words what layers do with their activations that don't keep them, e.g. `5 recompute, 2 swap`."""
    if memory is None:
        return "as before"
    counts = Counter(memory.values())
    return ", ".join(f"{counts[policy]} {policy}" for policy in sorted(counts)) or "all keep"


def to_text(moves: Sequence[RepartitionRecord]) -> str:
    """Return moves as JSON."""
    return json.dumps(asdict(RepartitionFile(VERSION, list(moves))), indent=1) + "\n"
