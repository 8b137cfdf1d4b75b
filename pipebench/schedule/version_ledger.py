"""Which versions of a stage's weights are alive, for the engine, which holds them, and for predictions of memory."""

import sys


class VersionLedger:
    """The lifetimes of a stage's weight versions, by number, without the weights.

    Alive are the newest version, those that units in flight use, and those that a later forward may request. It isn't
    thread-safe: if threads share a ledger, its owner has to lock it.
    """

    def __init__(self, *, in_place: bool, newest: int = 0) -> None:
        """Begin with one version, `newest`; `in_place`: whether updates overwrite the newest even while it is used."""
        self._in_place = in_place
        self.most_alive = 1  # the most versions that have been alive at once
        self.restart(newest)

    def restart(self, newest: int) -> None:
        """Begin anew with one version, which nothing uses."""
        self.newest = newest  # -1 once retired
        self.alive = {newest}
        self._users: dict[int, int] = {}  # version to the number of units in flight that use it
        self._keep_from = 0  # the oldest version that a forward may still request
        self._held: int | None = None  # see `hold`

    @property
    def in_use(self) -> bool:
        """Whether a unit in flight uses any version."""
        return bool(self._users)

    def use(self, number: int) -> None:
        """Note that another unit in flight uses a version."""
        self._users[number] = self._users.get(number, 0) + 1

    def release(self, number: int) -> bool:
        """Note that a unit no longer uses a version; return whether nothing needs that version any more."""
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
        """Hold the newest version, in place of the one held before, until the next call; return its number."""
        if self._held is not None:
            self.release(self._held)
        self._held = self.newest
        self.use(self._held)
        return self._held

    def step(self, keep_from: int) -> bool:
        """Make the next version; return whether it may overwrite the newest one.

        `keep_from` is the oldest version that a forward may still request. Older ones die as soon as no unit uses them.
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
        """Return the ledger of a copy of the weights, which has the newest version only."""
        return VersionLedger(in_place=self._in_place, newest=self.newest)

    def _collect(self) -> None:
        self.alive = {number for number in self.alive if number == self.newest or self._is_needed(number)}

    def _is_needed(self, number: int) -> bool:
        return number >= self._keep_from or number in self._users
