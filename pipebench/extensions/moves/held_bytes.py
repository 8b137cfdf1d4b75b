"""A worker's predicted bytes within an instruction, as engines count live tensors and report them to Algorithm 1.

Live tensors are counted between instructions. Within one, its results count from its start and its inputs until its
end, so every kind counts at its peak (docs/memory.md); messages are not counted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from pipebench.engine.setup import Setup
from pipebench.model.sampling import Size
from pipebench.schedule.instructions import BACKWARDS, COPIES
from pipebench.schedule.operations import Op
from pipebench.simulate.memory import (
    ACTIVATIONS,
    AGAIN,
    GRADIENTS,
    MASTERS,
    MOVED,
    SENT,
    STATE,
    VERSIONS,
    WEIGHTS,
    stage_memories,
)
from pipebench.simulate.replica_memory import Change, ReplicaMemory
from pipebench.simulate.simulation import TimelineEvent

Inputs = Mapping[Size, Mapping[str, int]]  # by size of the unit, bytes of every model input

# Kinds as in `replica.LiveBytes`: units waiting to be transferred count at their stage until sent.
_COUNTED: Final = {
    WEIGHTS: 0, VERSIONS: 0, MOVED: 1, MASTERS: 2, STATE: 2, GRADIENTS: 3, ACTIVATIONS: 4, SENT: 4, AGAIN: 5,
}  # fmt: skip
_OF_A_UNIT: Final = (Op.FORWARD, *BACKWARDS, *COPIES)


class HeldBytes:
    """Adds up one worker's bytes."""

    def __init__(self) -> None:
        self.now = self.most = 0  # peak within the latest instruction, and over all
        self._live = [0] * (1 + max(_COUNTED.values()))

    def noted(self, changes: Iterable[Change]) -> Iterator[Change]:
        """Yield an instruction's changes, and count them."""
        most = [*self._live]
        for change in changes:
            kind = _COUNTED.get(change.kind)
            if kind is not None:
                self._live[kind] += change.num_bytes
                most[kind] = max(most[kind], self._live[kind])
            yield change
        self.now = sum(most)
        self.most = max(self.most, self.now)


class SegmentBytes:
    """Tracks each worker's bytes in a straight pipeline's segment whose layers stay.

    `inputs` are the model's; there have been updates if `start_s`, the run's clock at the segment's start, is above 0.
    """

    def __init__(self, setup: Setup, size_of: Callable[[int], Size], inputs: Inputs, start_s: float) -> None:
        made = (ReplicaMemory(each) for each in stage_memories(setup.profile, setup.plan, setup.pipeline, inputs))
        self._holdings = [each.trained() if start_s > 0 else each for each in made]
        self._held = [HeldBytes() for _ in self._holdings]
        self._size_of = size_of
        for held, holding in zip(self._held, self._holdings, strict=True):
            _all(held.noted([*holding.before(), *(change for change in holding.come() if change.kind == STATE)]))

    def event(self, event: TimelineEvent) -> int:
        """Process an event; return its worker's peak bytes within it."""
        it, held = event.instruction, self._held[event.worker]
        if it.op is not Op.WAIT_NORM:
            size = self._size_of(it.number) if it.op in _OF_A_UNIT else 0
            _all(held.noted(self._holdings[it.stage].changes(it, size)))
        return held.now


def _all(changes: Iterable[Change]) -> None:
    for _ in changes:
        pass
