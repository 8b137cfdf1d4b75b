"""Which versions of a stage's weights are alive: what holds the tensors and what predicts their bytes both ask here."""

import sys


class VersionLedger:
    """The lifetimes of a stage's weight versions, as numbers: it holds no weights.

    Alive are the newest version, those that units in flight use, and those that a later forward may request. It takes
    no lock: where threads share one, its owner does. `in_place`: whether every update overwrites the newest, whoever
    uses it.
    """

    def __init__(self, *, in_place: bool, newest: int = 0) -> None:
        self._in_place = in_place
        self.most_alive = 1  # the most that have been alive at once
        self.restart(newest)

    def restart(self, newest: int) -> None:
        """Begin anew with one version, which nothing uses."""
        self.newest = newest  # the version of the most updates; -1 once retired
        self.alive = {newest}  # the versions that are alive
        self._users: dict[int, int] = {}
        self._keep_from = 0
        self._held: int | None = None

    @property
    def in_use(self) -> bool:
        """Whether a unit in flight uses any version."""
        return bool(self._users)

    def use(self, number: int) -> None:
        """A unit in flight uses a version."""
        self._users[number] = self._users.get(number, 0) + 1

    def release(self, number: int) -> bool:
        """A unit that used a version has left; return whether nothing needs that version any more."""
        left = self._users[number] - 1
        if left:
            self._users[number] = left
            return False
        del self._users[number]
        is_over = number < self._keep_from and number != self.newest
        if is_over:
            self.alive.discard(number)
        return is_over

    def hold(self) -> int:
        """Use the newest version in place of the one held before, however many updates follow; return its number."""
        if self._held is not None:
            self.release(self._held)
        self._held = self.newest
        self.use(self._held)
        return self._held

    def step(self, keep_from: int) -> bool:
        """Make the next version; return whether it takes the place of the newest, which nothing needs.

        `keep_from` is the oldest version that a forward may still request; older ones go as soon as no unit uses them.
        """
        self._keep_from = keep_from
        self._collect()
        in_place = self._in_place or not self._is_needed(self.newest)
        if in_place:
            self.alive.discard(self.newest)
        self.newest += 1
        self.alive.add(self.newest)
        self.most_alive = max(self.most_alive, len(self.alive))
        return in_place

    def retire(self) -> None:
        """Make no more versions, and keep only those that units in flight use."""
        self.newest, self._keep_from = -1, sys.maxsize
        self._collect()

    def copied(self) -> "VersionLedger":
        """Return that of a copy, which has the newest version alone."""
        return VersionLedger(in_place=self._in_place, newest=self.newest)

    def _collect(self) -> None:
        self.alive = {number for number in self.alive if number == self.newest or self._is_needed(number)}

    def _is_needed(self, number: int) -> bool:
        return number >= self._keep_from or number in self._users
