"""States: the places where a model can be cut, as downward-closed sets of layers, and what each cut carries.

A state contains every layer that its members read; a stage is the difference of two nested states. Paper: PipeDream
(SOSP'19) section 3.1 plans a chain; its artifact the antichains of the graph.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipebench.errors import PlanError
from pipebench.planner.activations import Activations
from pipebench.planner.tied import TiedBytes, tied_layers
from pipebench.profile.model import LayerProfile
from pipebench.schedule.modes import RECOMPUTE

Floats = NDArray[np.float64]
MAX_STATES = 2000  # a graph with more antichains is cut along its order of execution only


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
    saved_bytes: Floats  # kept for the backward
    parted_bytes: Floats  # kept on both sides of the cut, and counted before it
    recomputed_bytes: Floats  # recomputed by a backward
    resumes: Floats  # 1 where a cut separates two adjacent recomputed layers, else 0
    num_loading: Floats  # layers that read fields of the data set
    sent_bytes: Floats  # cross the cut forward: every value with a reader beyond it
    returned_bytes: Floats  # gradients of those values
    antichain_bytes: Floats  # the artifact's bytes of a cut: outputs of the state's augmented antichain
    next_bytes: Floats  # parameters of the first layer beyond the cut that has any
    activations: Activations | None = field(kw_only=True)  # bytes under per-layer policies; None: the sums above hold
    tied: TiedBytes | None = field(default=None, kw_only=True)  # None: no state separates users of a tied parameter

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every state contains the one before it."""
        return all(a & ~b == 0 for a, b in zip(self.members, self.members[1:], strict=False))

    @cached_property
    def inside(self) -> NDArray[np.bool_]:
        """[state, state] bool: whether the first is a proper subset of the second."""
        if self.is_chain:
            return np.triu(np.ones((len(self), len(self)), dtype=bool), 1)
        bits = _bits(self.members, len(self.rows)).astype(np.float32)
        missing = bits @ (1 - bits).T  # members of the first that the second lacks
        return np.triu(missing == 0, 1)

    def recomputing(self, memory: Sequence[str]) -> "States":
        """Return the states of the model with these policies, of which only recomputation matters here.

        A run of recomputed layers keeps its inputs, counted at their first reader; a run separated by a cut also keeps
        what crosses the cut. A tensor that a recomputed layer shares with another is charged to the other.
        """
        again = [policy == RECOMPUTE for policy in memory]
        again.append(again[-1])  # the loss is computed again with the last layer
        kept, run, read = [0.0] * len(again), 0, set[int]()
        for index, row in enumerate(self.rows):
            if not again[index]:
                alone = sum(num_bytes for holder, num_bytes in row.saved_with if again[holder])
                kept[index], run, read = row.saved_bytes + alone, index + 1, set()
                continue
            fresh = {source for source in row.reads if source < run} - read
            kept[index] = sum(self.rows[source].output_bytes for source in fresh)
            read |= fresh
        repeated = np.array(again, dtype=float)
        beyond = self._beyond
        return replace(
            self,
            backward_s=self.backward_s + self._sums(repeated * [row.forward_s for row in self.rows]),
            saved_bytes=self._sums(np.array(kept)),
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
        """Return a per-layer value summed over every state; the loss belongs to the last."""
        found = np.concatenate([bits @ values for bits in _blocks(self.members, len(self.rows))])
        found[-1] += values[-1]
        return found

    def _parted(self, again: Sequence[bool]) -> Floats:
        """Return `parted_bytes` given which layers are recomputed."""
        kept = _kept_twice(self.rows, again)
        found = np.concatenate([_parted(bits, kept) for bits in _blocks(self.members, len(self.rows))])
        found[-1] = 0.0
        return found

    def coarsened(self, step: int) -> "States":
        """Return every `step`-th state, the first and the last."""
        kept = sorted({0, len(self) - 1, *range(0, len(self), step)})
        return self.select(kept)

    def select(self, kept: Sequence[int]) -> "States":
        """Return some of the states."""
        arrays = [np.asarray(getattr(self, name))[..., list(kept)] for name in _ARRAYS]
        members = tuple(self.members[i] for i in kept)
        tied = None if self.tied is None else self.tied.select(kept)
        return States(self.rows, members, *arrays, activations=self.activations, tied=tied)

    def grouped(self, num_groups: int) -> "States":
        """Merge neighbouring states into about `num_groups` optimistic ones, besides the first and the last.

        In order of compute time, so that a state follows its subsets. Sums take the least over stages that end in a
        group and the most over those that begin there; cuts carry the least of the group; policies and copies of tied
        parameters are dropped. Groups
        grow by about equal time and parameters, so a layer above that lies between two groups, where it is counted.
        """
        compute_s = self.forward_s + self.backward_s
        order = np.lexsort((np.arange(len(self)), np.round(compute_s / (compute_s[-1] or 1.0), 9)))
        grown = sum(abs(np.diff(sums[order])) / (sums[-1] or 1.0) for sums in (compute_s, self.parameter_bytes))
        firsts = _evenly([0.0, *np.cumsum(grown).tolist()], num_groups)
        arrays: dict[str, Any] = {}
        for name in _ARRAYS:
            values = getattr(self, name)[order]
            least = np.minimum.reduceat(values, firsts)
            arrays[name] = np.stack([least, np.maximum.reduceat(values, firsts)]) if name in _GROWING else least
        chain = tuple((1 << index) - 1 for index in range(len(firsts)))
        return States(self.rows, chain, activations=None, **arrays)

    def weights(self, start: int, stop: int) -> float:
        """Return the parameter bytes of the stage between two states."""
        return float(self.parameter_bytes[stop] - self.parameter_bytes[start]) + self.copies(start, stop)

    def copies(self, start: int, stop: int) -> float:
        """Return those of its copies of tied parameters, which sums leave out."""
        return 0.0 if self.tied is None else float(self.tied.copies(np.array([start]), stop)[0][0, 0])

    def layers(self, start: int, stop: int) -> list[int]:
        """Return the layers of the stage between two states, in order of execution, without the loss."""
        bits = self.members[stop] & ~self.members[start]
        return [index for index in range(len(self.rows) - 1) if bits >> index & 1]


KnownStates = dict[tuple[int, bool], States]  # by size of a unit, and whether they separate tied parameters
_NO_ARRAYS = ("rows", "members", "activations", "tied")
_ARRAYS = tuple(each.name for each in fields(States) if each.name not in _NO_ARRAYS)
_SUMMED = ("forward_s", "backward_s", "saved_bytes", "num_loading")
_ONCE = ("parameter_bytes", "stepped_bytes")  # summed too, but a tied parameter counts once
_GROWING = (*_SUMMED, *_ONCE, "recomputed_bytes")
_HALVINGS = 40  # of how much a group may grow
_BLOCK_ELEMENTS = 1 << 22  # of [state, layer] at a time: a few MB for any number of states


def _evenly(grown: list[float], num_groups: int) -> list[int]:
    """Return the first states of at most `num_groups` groups with the least largest growth, and of the two ends.

    Args:
        grown: cumulative growth of the model up to every state, ascending.
        num_groups: without those of the first and the last state.
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


def prefixes(rows: Sequence[LayerProfile], *, ties: bool = False) -> States:
    """Return the cuts along the order of execution: those that an engine can run unchanged.

    `ties`: whether stages may have copies of tied parameters.

    Raises:
        PlanError: the profile has no layer.
    """
    graph = _Graph(rows, ties=ties)
    members, whole = [0], 0
    for index in graph.working:
        whole |= 1 << index
        members.append(whole)
    return graph.states(members, are_prefixes=True)


def antichains(rows: Sequence[LayerProfile], *, ties: bool = False) -> States:
    """Return the states of the PipeDream artifact's optimizer, or `prefixes` beyond MAX_STATES.

    States grow from the first source along edges; another source joins together with its first reader. Model inputs and
    unread `__getitem__`s are left out, as in the artifact. `ties` as in `prefixes`.

    Raises:
        PlanError: the profile has no layer.
    """
    graph = _Graph(rows, ties=ties)
    anchor = graph.working[0]
    first = graph.closures[anchor]
    beyond = {first: graph.readers_of[anchor] & ~first}  # per state, the layers outside that read one inside
    queue = [first]
    while queue:
        state = queue.pop()
        for index in _positions(beyond[state]):
            added = graph.closures[index] & ~state
            larger = state | added
            if larger in beyond or added & beyond[state] != 1 << index:  # another reader must join first
                continue
            readers = beyond[state]
            for joined in _positions(added):
                readers |= graph.readers_of[joined]
            beyond[larger] = readers & ~larger
            queue.append(larger)
        if len(beyond) >= MAX_STATES:
            return prefixes(rows, ties=ties)
    found = {0, *beyond} - {graph.everything}
    return graph.states([*sorted(found, key=lambda state: (state.bit_count(), state)), graph.everything])


def _bits(members: Sequence[int], num_rows: int) -> NDArray[np.bool_]:
    """Return membership, [state, layer] bool."""
    num_bytes = (num_rows + 7) // 8
    packed = np.frombuffer(b"".join(m.to_bytes(num_bytes, "little") for m in members), dtype=np.uint8)
    unpacked = np.unpackbits(packed.reshape(len(members), num_bytes), axis=1, bitorder="little")
    return unpacked[:, :num_rows].astype(bool)


def _blocks(members: Sequence[int], num_rows: int) -> Iterator[NDArray[np.bool_]]:
    """Yield `_bits` of a few states at a time."""
    step = max(1, _BLOCK_ELEMENTS // num_rows)
    return (_bits(members[i : i + step], num_rows) for i in range(0, len(members), step))


def _kept_twice(rows: Sequence[LayerProfile], again: Sequence[bool]) -> list[tuple[int, int, int]]:
    """Return (last earlier layer that saves it, layer, bytes) of tensors saved by two layers."""
    return [
        (holder, index, num_bytes)
        for index, row in enumerate(rows)
        for holder, num_bytes in row.saved_with
        if not (again[index] or again[holder])
    ]


def _parted(bits: NDArray[np.bool_], kept: Sequence[tuple[int, int, int]]) -> Floats:
    """Return the bytes saved both inside and outside of states, [state, layer] bool."""
    if not kept:
        return np.zeros(len(bits))
    holders, layers, num_bytes = np.array(kept, dtype=np.intp).T
    return np.asarray((bits[:, holders] & ~bits[:, layers]) @ num_bytes.astype(float))


def _positions(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class _Graph:
    """The layers that compute, and their readers."""

    def __init__(self, rows: Sequence[LayerProfile], *, ties: bool) -> None:
        self.rows, self.ties = tuple(rows), ties
        readers: list[list[int]] = [[] for _ in rows]
        for index, row in enumerate(rows):
            for read in row.reads:
                readers[read].append(index)
        self.working = [
            index
            for index, row in enumerate(rows[:-1])
            if not row.is_input and (readers[index] or not row.kind.startswith("__getitem__"))
        ]
        if not self.working:
            raise PlanError("the profile has no layer to plan")
        self.everything = sum(1 << index for index in self.working)
        readable = self.everything | 1 << len(rows) - 1  # the loss reads, too
        self.readers = [[reader for reader in each if readable >> reader & 1] for each in readers]

    @cached_property
    def closures(self) -> list[int]:
        """Every layer and all its ancestors, as bits."""
        found: list[int] = []
        for index, row in enumerate(self.rows):
            bits = 1 << index & self.everything
            for read in row.reads:
                bits |= found[read]
            found.append(bits)
        return found

    @cached_property
    def readers_of(self) -> list[int]:
        """Readers of every layer, as bits, without the loss."""
        return [sum(1 << reader for reader in readers) & self.everything for readers in self.readers]

    def states(self, members: Sequence[int], *, are_prefixes: bool = False) -> States:
        """Sum the layers' costs over every state; unless `ties`, without states that separate tied parameters."""
        tied = tied_layers(self.rows, self.working)
        kept = [state for state in members if self.ties or all(state & group in (0, group) for group in tied.values())]
        if are_prefixes:
            arrays = self._sums_of_prefixes(np.array([state.bit_count() for state in kept]))
        else:
            blocks = [*map(self._sums, _blocks(kept, len(self.rows)))]
            arrays = {name: np.concatenate([block[name] for block in blocks]) for name in _ARRAYS}
        loss = self.rows[-1]  # belongs to the last state
        for name in ("forward_s", "backward_s", "saved_bytes"):
            arrays[name][-1] += getattr(loss, name)
        for name in ("sent_bytes", "returned_bytes", "parted_bytes"):
            arrays[name][-1] = 0.0
        copies = TiedBytes.of(self.rows, tied, kept) if self.ties and tied else None
        return States(self.rows, tuple(kept), activations=None, tied=copies, **arrays)

    def _sums_of_prefixes(self, counts: NDArray[np.intp]) -> dict[str, Floats]:
        """Return `_sums` of prefixes with these numbers of layers, in linear time."""
        num_layers = len(self.working)
        rank = np.full(len(self.rows), num_layers)  # of layers that compute; the loss ranks last
        rank[self.working] = np.arange(num_layers)

        def summed(values: Floats) -> Floats:
            return np.concatenate([[0.0], np.cumsum(values[self.working])])[counts]

        def between(first: Any, last: Any, num_bytes: Any) -> Floats:
            """Count bytes in the states that hold a layer of the first ranks and none of the last ones."""
            changes = np.zeros(num_layers + 2)
            np.add.at(changes, np.asarray(first) + 1, num_bytes)
            np.subtract.at(changes, np.asarray(last) + 1, num_bytes)
            return np.cumsum(changes)[counts]

        def ends_of(count: int) -> NDArray[np.bool_]:
            ends = np.zeros(len(self.rows), dtype=bool)
            ends[self.working] = (np.arange(num_layers) < count) & (count <= np.array(first_read))
            return ends

        columns, places = self._columns, range(num_layers)
        readers = [[rank[reader] for reader in self.readers[index]] for index in self.working]
        last_read = [max(each, default=place) for place, each in enumerate(readers)]
        first_read = [min(each, default=num_layers) for each in readers]
        output_bytes, gradient_bytes = (columns[name][self.working] for name in ("output_bytes", "gradient_bytes"))
        twice = [(rank[a], rank[b], size) for a, b, size in self._kept_twice if rank[a] < num_layers]
        return {
            **{name: summed(columns[name]) for name in _SUMMED},
            **dict(zip(_ONCE, map(summed, self._own_parameter_bytes), strict=True)),
            "parted_bytes": between(*np.array(twice, dtype=np.intp).reshape(-1, 3).T),
            "recomputed_bytes": np.zeros(len(counts)),
            "resumes": np.zeros(len(counts)),
            "sent_bytes": between(places, last_read, output_bytes),
            "returned_bytes": between(places, last_read, gradient_bytes),
            "antichain_bytes": between(places, first_read, output_bytes) + self._added_bytes(map(ends_of, counts)),
            "next_bytes": self._next_bytes[counts],
        }

    @cached_property
    def _next_bytes(self) -> Floats:
        """Per number of layers before a cut: parameter bytes of the first layer beyond it that has any."""
        own, found = self._gradient_bytes, np.zeros(len(self.working) + 1)
        for place, index in reversed([*enumerate(self.working)]):
            found[place] = own[index] or found[place + 1]
        return found

    def _sums(self, bits: NDArray[np.bool_]) -> dict[str, Floats]:
        """Return the arrays of some states, [state, layer] bool, by name, none treated as the last."""
        own, stepped = self._own_parameter_bytes
        summed = bits.astype(float) @ np.stack([self._columns[name] for name in _SUMMED] + [own, stepped], 1)
        sources, targets, first_edge = self._edges
        crosses, is_read = np.zeros((2, *bits.shape), dtype=bool)
        if len(sources):
            read = bits[:, targets]
            crosses[:, sources[first_edge]] = np.logical_or.reduceat(bits[:, sources] & ~read, first_edge, axis=1)
            is_read[:, sources[first_edge]] = np.logical_or.reduceat(read, first_edge, axis=1)
        gradients, ends = self._gradient_bytes, bits & ~is_read
        beyond = ~bits & (gradients > 0)
        return {
            **dict(zip((*_SUMMED, *_ONCE), summed.T, strict=True)),
            "parted_bytes": _parted(bits, self._kept_twice),
            "recomputed_bytes": np.zeros(len(bits)),
            "resumes": np.zeros(len(bits)),
            "sent_bytes": crosses @ self._columns["output_bytes"],
            "returned_bytes": crosses @ self._columns["gradient_bytes"],
            "antichain_bytes": ends @ self._columns["output_bytes"] + self._added_bytes(ends),
            "next_bytes": np.where(beyond.any(1), gradients[beyond.argmax(1)], 0.0),
        }

    def _added_bytes(self, ends: Iterable[NDArray[np.bool_]]) -> Floats | float:
        """Return the bytes that augment the antichains, given the states' last layers, [layer] bool each.

        The artifact adds to a state's last layers every ancestor a of one of them with a reader that is neither a nor
        an ancestor of a: what crosses the cut, and also what has readers in two branches inside the state.
        """
        layers, added = self._added
        output_bytes = self._columns["output_bytes"][layers]
        return np.array([added[state].any(0) @ output_bytes for state in ends]) if len(layers) else 0.0

    @cached_property
    def _added(self) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Layers that the artifact may add, and [layer, added] bool: which of them for which last layer."""
        after = [0] * len(self.rows)  # every layer and all that depend on it
        adding = {}
        for index in reversed(self.working):
            shared = -1
            for reader in self.readers[index]:
                after[index] |= after[reader]
                shared &= after[reader]  # the loss depends on all layers, so what it reads is always needed
            if after[index] & ~shared:
                adding[index] = after[index] & ~shared
            after[index] |= 1 << index
        return np.array(list(adding), dtype=np.intp), _bits(list(adding.values()), len(self.rows)).T.copy()

    @cached_property
    def _edges(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Read layers and their readers, edge by edge, the loss included; and the first edge of every layer."""
        edges = [(index, reader) for index in self.working for reader in self.readers[index]]
        sources, targets = np.array(edges, dtype=np.intp).reshape(-1, 2).T
        return sources, targets, np.flatnonzero(np.diff(sources, prepend=-1))

    @cached_property
    def _kept_twice(self) -> list[tuple[int, int, int]]:
        return _kept_twice(self.rows, [False] * len(self.rows))

    @cached_property
    def _columns(self) -> dict[str, Floats]:
        names = ("forward_s", "backward_s", "saved_bytes", "output_bytes", "gradient_bytes")
        columns = {name: np.array([getattr(row, name) for row in self.rows], dtype=float) for name in names}
        return {**columns, "num_loading": np.array([bool(row.inputs) for row in self.rows], dtype=float)}

    @cached_property
    def _own_parameter_bytes(self) -> tuple[Floats, Floats]:
        """Parameter bytes and updated bytes per layer; a tied parameter counts at its first user."""
        seen: set[str] = set()
        own, stepped = np.zeros((2, len(self.rows)))
        for index in self.working:
            row = self.rows[index]
            sizes = {name: size for name, size in row.parameter_sizes.items() if name not in seen}
            own[index] = sum(sizes.values())
            stepped[index] = sum(row.master_sizes.get(name, size) for name, size in sizes.items())
            seen.update(sizes)
        return own, stepped

    @cached_property
    def _gradient_bytes(self) -> Floats:
        """Parameter bytes per layer; a tied parameter counts at its first user, or at all where these may be parted."""
        return (
            np.array([row.parameter_bytes for row in self.rows], dtype=float)
            if self.ties
            else self._own_parameter_bytes[0]
        )
