"""The parts of a stage while layers leave or join it, for replicas of tensors or of predicted bytes.

A unit runs backward through the replica that ran it forward. A part that is cut anew starts as a copy of the newest
weights and their state; the replica before it retires: it runs the backwards of its units in flight, makes no updates,
and is freed after the last. Units that ran forward through a block at its old owner run backward in a separate replica
of the block, a guest.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipebench.extensions.moves.repartition_plan import BlockTransfer

R = TypeVar("R")
Make = Callable[[int, int, int], R]  # from layers [start, stop) and the minibatch whose policies apply
CopyState = Callable[[R, int, int, int], R]  # the same, with the state of a replica


@dataclass
class StagePart(Generic[R]):
    """Adjacent layers of a stage that run as one."""

    replica: R
    start: int  # first layer
    stop: int  # the layer after the last
    leaves_to: int | None = None  # the next owner, if they are about to leave

    @property
    def bounds(self) -> tuple[int, int]:
        """Its first layer, and the one after its last."""
        return self.start, self.stop


class StageParts(Generic[R]):
    """The parts of one stage in layer order, and the replicas of each unit's backward.

    `whole` is the stage before any move, `units` those in flight.
    """

    def __init__(self, whole: StagePart[R], units: Iterable[int] = ()) -> None:
        self._parts = [whole]
        self._units = {unit: [whole.replica] for unit in units}  # backward replicas, in forward order
        self.guests: dict[int, StagePart[R]] = {}  # by the layers' previous stage

    def __iter__(self) -> Iterator[StagePart[R]]:
        return iter(self._parts)

    @property
    def whole(self) -> StagePart[R] | None:
        """The only part, if it stays and has run all units in flight forward."""
        (*others, last) = self._parts
        if others or last.leaves_to is not None or any(ran != [last.replica] for ran in self._units.values()):
            return None
        return last

    def begin(self, unit: int) -> Sequence[StagePart[R]]:
        """Return a unit's forward parts in order; those about to leave do not run it backward."""
        self._units[unit] = [part.replica for part in self._parts if part.leaves_to is None]
        return self._parts

    def end(self, unit: int) -> Iterator[R]:
        """Return a unit's backward replicas, in order."""
        return reversed(self._units.pop(unit, []))

    def ran_here(self, unit: int) -> list[R]:
        """Return the replicas of a unit's original forward, without guests, which swap nothing."""
        guests = [guest.replica for guest in self.guests.values()]
        return [replica for replica in self._units.get(unit, []) if replica not in guests]

    def owners(self) -> Iterable[R]:
        """Return the replicas of the stage's own layers, and retired ones with units in flight, once each."""
        units = (replica for unit in self._units for replica in self.ran_here(unit))
        return dict.fromkeys([*(part.replica for part in self._parts), *units])

    def part(self, block: BlockTransfer, copy: CopyState[R]) -> tuple[R, list[R]]:
        """Cut off a block that is about to leave; return the retired replica and its successors."""
        (old,) = (part for part in self._parts if part.start <= block.start and block.stop <= part.stop)
        made = []
        for start, stop in itertools.pairwise(sorted({*old.bounds, block.start, block.stop})):
            leaves_to = block.target if start == block.start else old.leaves_to
            made.append(StagePart(copy(old.replica, start, stop, block.at - 1), start, stop, leaves_to))
        return self._replaced(old, made)

    def renew(self, at: int, copy: CopyState[R]) -> tuple[R, list[R]]:
        """Cut the only part anew, for layers whose policies change with minibatch `at`; see `part`."""
        (old,) = self._parts
        return self._replaced(old, [StagePart(copy(old.replica, *old.bounds, at), *old.bounds)])

    def join(self, block: BlockTransfer, copy: CopyState[R]) -> tuple[R, list[R]]:
        """Merge an arrived block with the adjacent part; see `part`."""
        beside = [part for part in self._parts if part.leaves_to is None]
        (old,) = (part for part in beside if block.start == part.stop or block.stop == part.start)
        start, stop = min(block.start, old.start), max(block.stop, old.stop)
        return self._replaced(old, [StagePart(copy(old.replica, start, stop, block.at), start, stop)])

    def leave(self, target: int) -> R:
        """Remove the block that stage `target` takes; return its replica."""
        (part,) = (part for part in self._parts if part.leaves_to == target)
        self._parts.remove(part)
        return part.replica

    def guest(self, block: BlockTransfer, unit: int, make: Make[R]) -> R:
        """Return the replica for a unit's backward through a block that ran it forward at its old owner."""
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
