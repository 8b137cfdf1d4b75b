"""Copies of tied parameters: what stages have of them beside what a state's sums count, once, at the first user.

A stage that uses a parameter has all of it, with its gradient and optimizer state, though its sums differ by it only
where the first user is. What summing the copies' gradients takes, once per update, only the simulator charges.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipebench.profile.model import LayerProfile

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TiedBytes:
    """The tied parameters of a model's states."""

    num_bytes: Floats  # [tie] of one copy
    stepped_bytes: Floats  # [tie] of what the optimizer updates of it
    users: NDArray[np.intp]  # [tie, state] number of the state's layers that use it
    counted: NDArray[np.bool_]  # [tie, state] whether its first user is one of them

    @classmethod
    def of(cls, rows: Sequence[LayerProfile], tied: Mapping[str, int], members: Sequence[int]) -> "TiedBytes":
        """Return those of `tied_layers` in some states, given as bits of their layers."""
        first = [(rows[(group & -group).bit_length() - 1], name) for name, group in tied.items()]
        num_bytes = np.array([row.parameter_sizes[name] for row, name in first], dtype=float)
        stepped = np.array([row.master_sizes.get(name, row.parameter_sizes[name]) for row, name in first], dtype=float)
        users = np.array([[(state & group).bit_count() for state in members] for group in tied.values()], dtype=np.intp)
        counted = np.array([[state & group & -group > 0 for state in members] for group in tied.values()])
        return cls(num_bytes, stepped, users, counted)

    def select(self, chosen: Sequence[int]) -> "TiedBytes":
        """Return those of some of the states."""
        return replace(self, users=self.users[:, list(chosen)], counted=self.counted[:, list(chosen)])

    def copies(self, starts: NDArray[np.intp], stop_from: int) -> tuple[Floats, Floats]:
        """Return the bytes, and the updated bytes, of copies that sums leave out, of the stages [start, stop].

        They begin after the states `starts` and end at every state from `stop_from` on.
        """
        used = self.users[:, None, stop_from:] > self.users[:, starts, None]
        is_counted = self.counted[:, None, stop_from:] & ~self.counted[:, starts, None]
        extra = (used & ~is_counted).astype(float)
        return np.tensordot(self.num_bytes, extra, 1), np.tensordot(self.stepped_bytes, extra, 1)


def tied_layers(rows: Sequence[LayerProfile], indices: Iterable[int]) -> dict[str, int]:
    """Return the layers, of those of these indices, that use each tied parameter, as bits."""
    users: dict[str, int] = {}
    for index in indices:
        for name in rows[index].parameters:
            users[name] = users.get(name, 0) | 1 << index
    return {name: group for name, group in users.items() if group.bit_count() > 1}
