"""What a stage consists of while layers leave or join it, whatever runs them: tensors, or bytes that are predicted.

A unit that ran forward through a replica runs backward through it. What is cut anew, because a block of layers is to
leave or has come, starts as a copy of the newest weights and of all that belongs to them; who was there before retires:
it serves the backwards of its units in flight, makes no update any more, and goes with the last of them. Units that
ran forward through a block at its old owner run backward in a replica of the block's own, a guest.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipebench.schedule.moves import BlockTransfer

R = TypeVar("R")
Make = Callable[[int, int, int], R]  # of layers from one to before another, with the policies of a minibatch's forward
Copy = Callable[[R, int, int, int], R]  # likewise, which goes on from what a replica has


@dataclass
class StagePart(Generic[R]):
    """Layers of the stage that run as one.

    Attributes:
        replica: runs them.
        start: the first of them.
        stop: the layer after the last.
        leaves_to: the stage that takes them, where they are about to leave.
    """

    replica: R
    start: int
    stop: int
    leaves_to: int | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """Its first layer, and the one after its last."""
        return self.start, self.stop


class StageParts(Generic[R]):
    """The parts of one stage, in the order of their layers, and who runs which unit backward.

    Args:
        whole: all of the stage, before any layer moves.
        units: that it has in flight.

    Attributes:
        guests: by the stage that their layers come from.
    """

    def __init__(self, whole: StagePart[R], units: Iterable[int] = ()) -> None:
        self._parts = [whole]
        self._units = {unit: [whole.replica] for unit in units}  # who runs them backward, in forward order
        self.guests: dict[int, StagePart[R]] = {}

    def __iter__(self) -> Iterator[StagePart[R]]:
        return iter(self._parts)

    @property
    def whole(self) -> StagePart[R] | None:
        """The one part there is, if it stays and has run all units in flight forward."""
        (*others, last) = self._parts
        if others or last.leaves_to is not None or any(ran != [last.replica] for ran in self._units.values()):
            return None
        return last

    def begin(self, unit: int) -> Sequence[StagePart[R]]:
        """Return the parts that run a unit forward, in order; of those that are about to leave none runs it back."""
        self._units[unit] = [part.replica for part in self._parts if part.leaves_to is None]
        return self._parts

    def end(self, unit: int) -> Iterator[R]:
        """Return who runs a unit backward, in order."""
        return reversed(self._units.pop(unit, []))

    def ran_here(self, unit: int) -> list[R]:
        """Return who ran a unit forward here at first; a guest does so right before the backward, and swaps nothing."""
        guests = [guest.replica for guest in self.guests.values()]
        return [replica for replica in self._units.get(unit, []) if replica not in guests]

    def owners(self) -> Iterable[R]:
        """Return who runs the stage's own layers, and those who have retired and have units in flight, once."""
        units = (replica for unit in self._units for replica in self.ran_here(unit))
        return dict.fromkeys([*(part.replica for part in self._parts), *units])

    def part(self, block: BlockTransfer, copy: Copy[R]) -> tuple[R, list[R]]:
        """Cut a block apart that is about to leave; return who retires, and who goes on."""
        (old,) = (part for part in self._parts if part.start <= block.start and block.stop <= part.stop)
        made = []
        for start, stop in itertools.pairwise(sorted({*old.bounds, block.start, block.stop})):
            leaves_to = block.target if start == block.start else old.leaves_to
            made.append(StagePart(copy(old.replica, start, stop, block.at - 1), start, stop, leaves_to))
        return self._replaced(old, made)

    def renew(self, at: int, copy: Copy[R]) -> tuple[R, list[R]]:
        """Cut the one part there is anew, for layers whose policies change with minibatch `at`; see `part`."""
        (old,) = self._parts
        return self._replaced(old, [StagePart(copy(old.replica, *old.bounds, at), *old.bounds)])

    def join(self, block: BlockTransfer, copy: Copy[R]) -> tuple[R, list[R]]:
        """Let a block that has come run with the layers beside it as one; see `part`."""
        beside = [part for part in self._parts if part.leaves_to is None]
        (old,) = (part for part in beside if block.start == part.stop or block.stop == part.start)
        start, stop = min(block.start, old.start), max(block.stop, old.stop)
        return self._replaced(old, [StagePart(copy(old.replica, start, stop, block.at), start, stop)])

    def leave(self, target: int) -> R:
        """Return who has run a block that a stage takes now; it is not here any more."""
        (part,) = (part for part in self._parts if part.leaves_to == target)
        self._parts.remove(part)
        return part.replica

    def guest(self, block: BlockTransfer, unit: int, make: Make[R]) -> R:
        """Return who runs a unit backward through a block that ran it forward at its old owner."""
        if block.source not in self.guests:
            made = make(block.start, block.stop, block.at - 1)
            self.guests[block.source] = StagePart(made, block.start, block.stop)
        guest, ran = self.guests[block.source].replica, self._units[unit]
        ran.insert(len(ran) if block.goes_left else 0, guest)
        return guest

    def _replaced(self, old: StagePart[R], made: list[StagePart[R]]) -> tuple[R, list[R]]:
        index = self._parts.index(old)
        self._parts[index : index + 1] = made
        return old.replica, [part.replica for part in made]
