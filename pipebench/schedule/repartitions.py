"""The record of a run's repartitions: the cuts from each minibatch on, and why.

A run given the same record cuts at the same places from the same minibatches on, and computes the same weights on any
engine.
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
    """New cuts, from a minibatch of a run on."""

    minibatch: Ordinal  # first of the run, from 0, that runs forward under them
    cuts: tuple[str, ...]  # first layer of every stage but the first
    memory: dict[str, str] | None = None  # by name, policies of layers that don't keep; None: unchanged
    was: tuple[str, ...] = ()  # the cuts before
    why: str = "decided beforehand"  # in words
    live: bool = False  # whether training went on; else the pipeline was drained first
    samples: Count = 0  # of the run before that minibatch
    clock_s: Amount = 0.0  # the run's clock when the new cuts were in place
    stall_s: Amount = 0.0  # seconds without computation since the drain; 0 if training went on


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
