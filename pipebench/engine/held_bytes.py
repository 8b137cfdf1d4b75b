"""What a worker holds within an instruction, predicted: what engines count in live tensors, and Algorithm 1 is told.

Live tensors can be counted between two instructions. Within one, what it makes is there from its start on and what it
is done with until its end, so that every kind counts at its most (docs/memory.md); messages aren't counted.
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

# Kinds as live tensors are counted, `replica.LiveBytes`: what is set aside to be given is a stage's until it sets out.
_COUNTED: Final = {
    WEIGHTS: 0, VERSIONS: 0, MOVED: 1, MASTERS: 2, STATE: 2, GRADIENTS: 3, ACTIVATIONS: 4, SENT: 4, AGAIN: 5,
}  # fmt: skip
_OF_A_UNIT: Final = (Op.FORWARD, *BACKWARDS, *COPIES)


class HeldBytes:
    """Adds up what one worker holds.

    Attributes:
        now: the most bytes within the latest instruction.
        most: the most of these.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self._live = [0] * (1 + max(_COUNTED.values()))

    def noted(self, changes: Iterable[Change]) -> Iterator[Change]:
        """Yield the changes of an instruction, and take note of them."""
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
    """Follows what every worker of a straight pipeline holds in a segment in which layers stay.

    Args:
        setup: what is run.
        size_of: the size of a unit.
        inputs: of the model.
        start_s: the run's clock when the segment begins; there have been updates before, but at 0.
    """

    def __init__(self, setup: Setup, size_of: Callable[[int], Size], inputs: Inputs, start_s: float) -> None:
        made = (ReplicaMemory(each) for each in stage_memories(setup.profile, setup.plan, setup.pipeline, inputs))
        self._holdings = [each.trained() if start_s > 0 else each for each in made]
        self._held = [HeldBytes() for _ in self._holdings]
        self._size_of = size_of
        for held, holding in zip(self._held, self._holdings, strict=True):
            _all(held.noted([*holding.before(), *(change for change in holding.come() if change.kind == STATE)]))

    def event(self, event: TimelineEvent) -> int:
        """Take note of one event; return the most bytes that its worker held within it."""
        it, held = event.instruction, self._held[event.worker]
        if it.op is not Op.WAIT_NORM:
            size = self._size_of(it.number) if it.op in _OF_A_UNIT else 0
            _all(held.noted(self._holdings[it.stage].changes(it, size)))
        return held.now


def _all(changes: Iterable[Change]) -> None:
    for _ in changes:
        pass
