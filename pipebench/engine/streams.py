"""States that stateful modules carry from one minibatch of a stream to its next one, as an LSTM does over a text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

TRAIN = "train"


class StreamSlot(NamedTuple):
    """The stream, and the microbatch in its minibatches, whose state a unit continues."""

    split: str  # `train` or `eval`
    stream: int
    microbatch: int
    starts: bool  # whether the stream begins: there is no state yet


ALONE = StreamSlot(TRAIN, 0, 0, starts=True)


class StreamStates(dict[tuple[str, int, int], list[Any]]):
    """States by split, stream and microbatch, one per stateful module of a stage."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.modules = modules

    def load(self, place: StreamSlot) -> list[Any]:
        """Load the state after the stream's previous minibatch into the modules; return it."""
        carried = self[place[:3]] if self.modules and not place.starts else [None] * len(self.modules)
        self.carry(carried)
        return carried

    def carry(self, carried: Sequence[Any]) -> None:
        """Load states into the modules."""
        for module, state in zip(self.modules, carried, strict=True):
            module.carried_state = state

    def store(self, place: StreamSlot) -> None:
        """Store the modules' states for the stream's next minibatch."""
        if self.modules:
            self[place[:3]] = [module.carried_state for module in self.modules]

    def forget(self, split: str) -> None:
        """Drop the states of a split's streams."""
        for key in [key for key in self if key[0] == split]:
            del self[key]
