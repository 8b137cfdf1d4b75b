"""Copies of tied parameters: the bytes that stages hold of them in addition to the sums over states.

A tied parameter counts in these sums once, at its first user. But every stage that uses it holds a copy, with gradient
and optimizer state if it is trained. The time to sum the copies' gradients, once per update, is only in the simulator.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipebench.planner.activations import Floats
from pipebench.profile.model import LayerProfile


@dataclass(frozen=True)
class TiedBytes:
    """The tied parameters of a model's states."""

    num_bytes: Floats  # [kind, tie] of one copy, by the fields of `ParameterBytes`
    users: NDArray[np.intp]  # [tie, state] number of the state's layers that use it
    counted: NDArray[np.bool_]  # [tie, state] whether the state has its first user

    @classmethod
    def of(cls, rows: Sequence[LayerProfile], tied: Mapping[str, int], members: Sequence[int]) -> "TiedBytes":
        """Return the tied parameters of some states, given `tied_layers` and the members of every state as bits."""
        first = [(rows[(group & -group).bit_length() - 1], name) for name, group in tied.items()]
        num_bytes = np.array([row.held[name] for row, name in first], dtype=float).T
        users = np.array([[(state & group).bit_count() for state in members] for group in tied.values()], dtype=np.intp)
        counted = np.array([[state & group & -group > 0 for state in members] for group in tied.values()])
        return cls(num_bytes, users, counted)

    def select(self, chosen: Sequence[int]) -> "TiedBytes":
        """Return the tied parameters of some of the states."""
        return replace(self, users=self.users[:, list(chosen)], counted=self.counted[:, list(chosen)])

    @property
    def is_trained(self) -> bool:
        """Whether any of them is trained."""
        return bool(self.num_bytes[0].any())

    def copies(self, starts: NDArray[np.intp], stop_from: int) -> Floats:
        """Return the bytes of copies that sums leave out, [kind, start, stop].

        Stages begin at the states `starts` and end at every state from `stop_from` on.
        """
        used = self.users[:, None, stop_from:] > self.users[:, starts, None]
        is_counted = self.counted[:, None, stop_from:] & ~self.counted[:, starts, None]
        return np.tensordot(self.num_bytes, (used & ~is_counted).astype(float), 1)


def tied_layers(rows: Sequence[LayerProfile], indices: Iterable[int], *, trained: bool) -> dict[str, int]:
    """Return the layers, as bits, that use each tied parameter, among the layers `indices`.

    `trained` selects trained parameters, or those that aren't.
    """
    users: dict[str, int] = {}
    for index in indices:
        for name in rows[index].parameter_sizes if trained else rows[index].untrained_sizes:
            users[name] = users.get(name, 0) | 1 << index
    return {name: group for name, group in users.items() if group.bit_count() > 1}
