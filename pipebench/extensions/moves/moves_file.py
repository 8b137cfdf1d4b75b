"""The record of a run's repartitions: the cuts from each minibatch on, and why.

A run given the same record cuts at the same places from the same minibatches on, and computes the same weights on any
engine.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.typed_json import Within

FILE_NAME = "moves.json"
VERSION = 1


@dataclass
class RepartitionFile:
    """The file: its format version, and all of a run's records in order."""

    pipebench_moves: Annotated[int, Within(VERSION, VERSION, str(VERSION))]
    moves: list[RepartitionRecord] = field(default_factory=list)


def in_words(memory: Mapping[str, str] | None) -> str:
    """Return the number of layers per policy other than keep, e.g. `5 recompute, 2 swap`."""
    if memory is None:
        return "as before"
    counts = Counter(memory.values())
    return ", ".join(f"{counts[policy]} {policy}" for policy in sorted(counts)) or "all keep"


def to_text(moves: Sequence[RepartitionRecord]) -> str:
    """Return the records as JSON."""
    return json.dumps(asdict(RepartitionFile(VERSION, list(moves))), indent=1) + "\n"
