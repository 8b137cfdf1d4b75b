"""The parts of a stage while layers leave or join it.

The bookkeeping is the same for replicas that hold tensors (`migration`) and for those that hold predicted bytes
(`migration_memory`), so `StageParts` is generic in the replica.

Whenever a stage's layers or their policies change, its replica is replaced by one of the new layers, with a copy of
the newest weights and their state. The old replica retires: it still runs the backwards of its units in flight, since a
unit runs backward in the replica that ran it forward, but it makes no updates, and is freed after the last backward.
Units that ran forward through a block on its old stage run backward in a separate replica of the block, a guest.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipebench.extensions.moves.repartition_plan import BlockTransfer

R = TypeVar("R")
Make = Callable[[int, int, int], R]  # (start, stop, minibatch): makes layers [start, stop) with a minibatch's policies
CopyState = Callable[[R, int, int, int], R]  # (old, start, stop, minibatch): the same, with the state of `old`


@dataclass
class StagePart(Generic[R]):
    """Consecutive layers of a stage that one replica runs."""

    replica: R
    start: int  # first layer
    stop: int  # the layer after the last
    leaves_to: int | None = None  # the stage that takes these layers, if they are about to leave

    @property
    def bounds(self) -> tuple[int, int]:
        """First layer, and the layer after the last."""
        return self.start, self.stop


class StageParts(Generic[R]):
    """The parts of one stage in layer order, and the replicas of each unit's backward.

    Args:
        whole: the stage before any move.
        units: units in flight, which `whole` has run forward.
    """

    def __init__(self, whole: StagePart[R], units: Iterable[int] = ()) -> None:
        self._parts = [whole]
        self._units = {unit: [whole.replica] for unit in units}  # backward replicas, in forward order
        self.guests: dict[int, StagePart[R]] = {}  # by the layers' previous stage

    def __iter__(self) -> Iterator[StagePart[R]]:
        return iter(self._parts)

    @property
    def whole(self) -> StagePart[R] | None:
        """The only part if one replica runs the whole stage for all units in flight, else None."""
        (*others, last) = self._parts
        if others or last.leaves_to is not None or any(ran != [last.replica] for ran in self._units.values()):
            return None
        return last

    def begin(self, unit: int) -> Sequence[StagePart[R]]:
        """Return the parts of a unit's forward, in order; parts about to leave do not run its backward."""
        self._units[unit] = [part.replica for part in self._parts if part.leaves_to is None]
        return self._parts

    def end(self, unit: int) -> Iterator[R]:
        """Return the replicas of a unit's backward, in order."""
        return reversed(self._units.pop(unit, []))

    def ran_here(self, unit: int) -> list[R]:
        """Return the replicas that ran a unit forward here first: all but guests, which swap nothing."""
        guests = [guest.replica for guest in self.guests.values()]
        return [replica for replica in self._units.get(unit, []) if replica not in guests]

    def owners(self) -> Iterable[R]:
        """Return each replica of the stage's own layers once, retired ones with units in flight included."""
        units = (replica for unit in self._units for replica in self.ran_here(unit))
        return dict.fromkeys([*(part.replica for part in self._parts), *units])

    def cut_off(self, block: BlockTransfer, copy: CopyState[R]) -> tuple[R, list[R]]:
        """Separate a block that is about to leave; return the retired replica and its successors."""
        (old,) = (part for part in self._parts if part.start <= block.start and block.stop <= part.stop)
        made = []
        for start, stop in itertools.pairwise(sorted({*old.bounds, block.start, block.stop})):
            leaves_to = block.target if start == block.start else old.leaves_to
            made.append(StagePart(copy(old.replica, start, stop, block.at - 1), start, stop, leaves_to))
        return self._replaced(old, made)

    def renew(self, at: int, copy: CopyState[R]) -> tuple[R, list[R]]:
        """Rebuild the only part, whose policies change with minibatch `at`; returns as `cut_off` does."""
        (old,) = self._parts
        return self._replaced(old, [StagePart(copy(old.replica, *old.bounds, at), *old.bounds)])

    def join(self, block: BlockTransfer, copy: CopyState[R]) -> tuple[R, list[R]]:
        """Merge an arrived block with the adjacent part; returns as `cut_off` does."""
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
        """Return the guest for a unit's backward through a block that stage `block.source` ran it forward through."""
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
