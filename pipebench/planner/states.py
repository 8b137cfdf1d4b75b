"""States: the places where a model can be cut, as downward-closed sets of layers, and what each cut carries.

A state contains every layer that its members read. A stage is the difference of two nested states. Paper: PipeDream
(SOSP'19) section 3.1 plans chains of layers; its artifact plans over the antichains of the graph.
"""

import bisect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipebench.planner.activations import Activations, Floats
from pipebench.planner.tied import TiedBytes
from pipebench.profile.model import LayerProfile
from pipebench.schedule.modes import RECOMPUTE


@dataclass(frozen=True)
class States:
    """All states of a model, smallest first, from the empty one to the whole model.

    Arrays hold sums over a state's layers, so a stage's sum is the difference of two entries. Grouped states
    (`grouped`) have two rows: for stages that end there and for stages that begin there.
    """

    rows: tuple[LayerProfile, ...]  # layers; the last is the loss, which belongs to the last stage
    members: tuple[int, ...]  # bit set of layers per state
    forward_s: Floats
    backward_s: Floats
    parameter_bytes: Floats  # trainable parameters, a tied one counted once
    stepped_bytes: Floats  # what the optimizer updates: the same, or master weights in mixed precision
    untrained_bytes: Floats  # parameters that aren't trained, and buffers, a tied one counted once
    saved_bytes: Floats  # kept for the backward
    parted_bytes: Floats  # kept on both sides of the cut; sums count them before it
    recomputed_bytes: Floats  # recomputed by a backward
    resumes: Floats  # 1 where a cut separates two adjacent recomputed layers, else 0
    num_loading: Floats  # layers that read fields of the data set
    sent_bytes: Floats  # of every value with a reader beyond the cut
    returned_bytes: Floats  # of those values' gradients
    antichain_bytes: Floats  # the artifact's bytes of a cut: outputs of the state's augmented antichain
    next_bytes: Floats  # parameters of the first layer beyond the cut that has any
    # Activations if layers have different policies; None: `saved_bytes` and the other sums hold
    activations: Activations | None = field(kw_only=True)
    tied: TiedBytes | None = field(default=None, kw_only=True)  # None: no state separates users of a shared parameter

    def __len__(self) -> int:
        return len(self.members)

    @property
    def parts_ties(self) -> bool:
        """Whether states separate layers that share a trained parameter."""
        return self.tied is not None and self.tied.is_trained

    @property
    def used_bytes(self) -> Floats:
        """Trained parameters; a tied one counts for every layer that uses it if states separate such layers."""
        if not self.parts_ties:
            return self.parameter_bytes
        return self._sums(np.array([row.parameter_bytes for row in self.rows], dtype=float))

    @cached_property
    def is_chain(self) -> bool:
        """Whether every state contains the one before it."""
        return all(a & ~b == 0 for a, b in zip(self.members, self.members[1:], strict=False))

    @cached_property
    def after(self) -> dict[int, int]:
        """Index of the state with a number of layers: in a chain, the cut before the next layer."""
        return {members.bit_count(): state for state, members in enumerate(self.members)}

    @cached_property
    def inside(self) -> NDArray[np.bool_]:
        """[state, state] bool: whether the first is a proper subset of the second."""
        if self.is_chain:
            return np.triu(np.ones((len(self), len(self)), dtype=bool), 1)
        bits = layer_bits(self.members, len(self.rows)).astype(np.float32)
        missing = bits @ (1 - bits).T  # members of the first that the second lacks
        return np.triu(missing == 0, 1)

    def recomputing(self, memory: Sequence[str]) -> "States":
        """Return the states with the layers recomputed that have this policy; other policies have no effect here.

        A run of recomputed layers keeps its inputs, which count at their first reader. A run that a cut separates also
        keeps what crosses the cut. A tensor that a recomputed layer shares with another counts at the other layer.
        """
        again = [policy == RECOMPUTE for policy in memory]
        again.append(again[-1])  # the loss has the last layer's policy
        saved, run, read = [0.0] * len(again), 0, set[int]()
        for index, row in enumerate(self.rows):
            if not again[index]:
                alone = sum(num_bytes for holder, num_bytes in row.saved_with if again[holder])
                saved[index], run, read = row.saved_bytes + alone, index + 1, set()
                continue
            fresh = {source for source in row.reads if source < run} - read
            saved[index] = sum(self.rows[source].output_bytes for source in fresh)
            read |= fresh
        repeated = np.array(again, dtype=float)
        beyond = self._beyond
        return replace(
            self,
            backward_s=self.backward_s + self._sums(repeated * [row.forward_s for row in self.rows]),
            saved_bytes=self._sums(np.array(saved)),
            parted_bytes=self._parted(again),
            recomputed_bytes=self._sums(repeated * [row.saved_bytes for row in self.rows]),
            resumes=np.array([float(again[i] and (i == 0 or again[i - 1])) for i in beyond]),
        )

    @cached_property
    def _beyond(self) -> list[int]:
        """First layer beyond each cut; -1 beyond the last."""
        missing = [self.members[-1] & ~bits for bits in self.members]
        return [(bits & -bits).bit_length() - 1 for bits in missing]

    @cached_property
    def bounds(self) -> NDArray[np.intp]:
        """First layer beyond each cut of a chain; beyond the last, the number of rows."""
        return np.array([*self._beyond[:-1], len(self.rows)], dtype=np.intp)

    def _sums(self, values: Floats) -> Floats:
        """Return the sums of a per-layer value over every state; the loss belongs to the last state."""
        found = np.concatenate([bits @ values for bits in blocks_of_bits(self.members, len(self.rows))])
        found[-1] += values[-1]
        return found

    def _parted(self, again: Sequence[bool]) -> Floats:
        """Return `parted_bytes` if these layers are recomputed."""
        shared = saved_twice(self.rows, again)
        found = np.concatenate([parted(bits, shared) for bits in blocks_of_bits(self.members, len(self.rows))])
        found[-1] = 0.0
        return found

    def select(self, chosen: Sequence[int]) -> "States":
        """Return some of the states."""
        arrays = [np.asarray(getattr(self, name))[..., list(chosen)] for name in ARRAYS]
        members = tuple(self.members[i] for i in chosen)
        tied = None if self.tied is None else self.tied.select(chosen)
        return States(self.rows, members, *arrays, activations=self.activations, tied=tied)

    def grouped(self, num_groups: int) -> "States":
        """Merge neighbouring states into about `num_groups` optimistic ones, besides the first and the last.

        States are ordered by compute time, so that a state follows its subsets. For stages that end in a group, sums
        have the least of the group, for stages that begin there the most; cuts carry the least bytes of the group.
        Policies and copies of tied parameters are left out. Groups span about equal time and parameters: a layer with
        more than that lies between two groups, where it counts.
        """
        compute_s = self.forward_s + self.backward_s
        order = np.lexsort((np.arange(len(self)), np.round(compute_s / (compute_s[-1] or 1.0), 9)))
        grown = sum(abs(np.diff(sums[order])) / (sums[-1] or 1.0) for sums in (compute_s, self.parameter_bytes))
        firsts = _evenly([0.0, *np.cumsum(grown).tolist()], num_groups)
        arrays: dict[str, Any] = {}
        for name in ARRAYS:
            values = getattr(self, name)[order]
            least = np.minimum.reduceat(values, firsts)
            arrays[name] = np.stack([least, np.maximum.reduceat(values, firsts)]) if name in _GROWING else least
        chain = tuple((1 << index) - 1 for index in range(len(firsts)))
        return States(self.rows, chain, activations=None, **arrays)

    def weights(self, start: int, stop: int) -> float:
        """Return the parameter bytes of the stage between two states."""
        return float(self.parameter_bytes[stop] - self.parameter_bytes[start]) + self.copies(start, stop)

    def copies(self, start: int, stop: int) -> float:
        """Return the bytes of a stage's copies of tied trained parameters, which sums leave out."""
        return 0.0 if self.tied is None else float(self.tied.copies(np.array([start]), stop)[0, 0, 0])

    def layers(self, start: int, stop: int) -> list[int]:
        """Return the layers of the stage between two states, in order of execution, without the loss."""
        bits = self.members[stop] & ~self.members[start]
        return [index for index in range(len(self.rows) - 1) if bits >> index & 1]


@dataclass(frozen=True)
class PlanningCache:
    """Results that the modes of one request share, filled as they are planned."""

    # By size of a unit, and whether states may part layers with a tied parameter
    states: dict[tuple[int, bool], States] = field(default_factory=dict)
    floors: dict[Hashable, Any] = field(default_factory=dict)  # instances of `Floors`, by what they depend on


_NO_ARRAYS = ("rows", "members", "activations", "tied")
ARRAYS = tuple(each.name for each in fields(States) if each.name not in _NO_ARRAYS)
SUMMED = ("forward_s", "backward_s", "saved_bytes", "num_loading")
# Sums in which a tied parameter counts once, in the order of the fields of `ParameterBytes`
ONCE = ("parameter_bytes", "stepped_bytes", "untrained_bytes")
_GROWING = (*SUMMED, *ONCE, "recomputed_bytes")
_HALVINGS = 40  # bisection steps for the largest growth of a group
_BLOCK_ELEMENTS = 1 << 22  # of [state, layer] at a time: a few MB for any number of states


def _evenly(grown: list[float], num_groups: int) -> list[int]:
    """Return the first states of groups that minimise the largest growth within a group.

    There are at most `num_groups`, besides those of the first and the last state. `grown` is the cumulative growth of
    the model up to every state, ascending.
    """

    def groups(limit: float) -> list[int]:
        firsts, at = [0], 1
        while at < len(grown) - 1 and len(firsts) <= num_groups + 1:
            firsts.append(at)
            at = min(bisect.bisect_right(grown, grown[at] + limit), len(grown) - 1)
        return [*firsts, len(grown) - 1]

    low, high = 0.0, grown[-1]
    if len(groups(low)) <= num_groups + 2:
        return groups(low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(groups(middle)) <= num_groups + 2 else (middle, high)
    return groups(high)


def layer_bits(members: Sequence[int], num_rows: int) -> NDArray[np.bool_]:
    """Return membership, [state, layer] bool."""
    num_bytes = (num_rows + 7) // 8
    packed = np.frombuffer(b"".join(m.to_bytes(num_bytes, "little") for m in members), dtype=np.uint8)
    unpacked = np.unpackbits(packed.reshape(len(members), num_bytes), axis=1, bitorder="little")
    return unpacked[:, :num_rows].astype(bool)


def blocks_of_bits(members: Sequence[int], num_rows: int) -> Iterator[NDArray[np.bool_]]:
    """Yield `layer_bits` of a few states at a time."""
    step = max(1, _BLOCK_ELEMENTS // num_rows)
    return (layer_bits(members[i : i + step], num_rows) for i in range(0, len(members), step))


def saved_twice(rows: Sequence[LayerProfile], again: Sequence[bool]) -> list[tuple[int, int, int]]:
    """Return (last earlier layer that saves it, layer, bytes) of tensors saved by two layers."""
    return [
        (holder, index, num_bytes)
        for index, row in enumerate(rows)
        for holder, num_bytes in row.saved_with
        if not (again[index] or again[holder])
    ]


def parted(bits: NDArray[np.bool_], shared: Sequence[tuple[int, int, int]]) -> Floats:
    """Return the bytes saved both inside and outside of states, [state, layer] bool."""
    if not shared:
        return np.zeros(len(bits))
    holders, layers, num_bytes = np.array(shared, dtype=np.intp).T
    return np.asarray((bits[:, holders] & ~bits[:, layers]) @ num_bytes.astype(float))
