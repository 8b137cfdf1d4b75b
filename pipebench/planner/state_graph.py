"""From a graph of layers to its states: along the order of execution, or all antichains."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipebench.errors import PlanError
from pipebench.planner.activations import Floats
from pipebench.planner.states import ARRAYS, ONCE, SUMMED, States, blocks_of_bits, layer_bits, parted, saved_twice
from pipebench.planner.tied import TiedBytes, tied_layers
from pipebench.profile.model import LayerProfile, ParameterBytes

MAX_STATES = 2000  # a graph with more states is cut along its order of execution only


def prefixes(rows: Sequence[LayerProfile], *, ties: bool = False) -> States:
    """Return the cuts along the order of execution: those that an engine can run unchanged.

    `ties`: whether stages may have copies of tied parameters.

    Raises:
        PlanError: the profile has no layer.
    """
    graph = _ComputingLayers(rows, ties=ties)
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
    graph = _ComputingLayers(rows, ties=ties)
    anchor = graph.working[0]
    first = graph.closures[anchor]
    beyond = {first: graph.readers_of[anchor] & ~first}  # per state, the layers outside that read one inside
    queue = [first]
    while queue:
        state = queue.pop()
        for index in _positions(beyond[state]):
            added = graph.closures[index] & ~state
            larger = state | added
            if larger in beyond or added & beyond[state] != 1 << index:  # another layer beyond must join first
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


def _positions(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class _ComputingLayers:
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
        readable = self.everything | 1 << len(rows) - 1  # the loss also reads
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
        """Return the states with these members; unless `ties`, without those that part layers with a tied parameter."""
        tied = tied_layers(self.rows, self.working, trained=True)
        whole = [state for state in members if self.ties or all(state & group in (0, group) for group in tied.values())]
        if are_prefixes:
            arrays = self._sums_of_prefixes(np.array([state.bit_count() for state in whole]))
        else:
            blocks = [*map(self._sums, blocks_of_bits(whole, len(self.rows)))]
            arrays = {name: np.concatenate([block[name] for block in blocks]) for name in ARRAYS}
        loss = self.rows[-1]  # belongs to the last state
        for name in ("forward_s", "backward_s", "saved_bytes"):
            arrays[name][-1] += getattr(loss, name)
        arrays["num_loading"][-1] += loss.reads_samples
        for name in ("sent_bytes", "returned_bytes", "parted_bytes"):
            arrays[name][-1] = 0.0
        parted = (tied if self.ties else {}) | tied_layers(self.rows, self.working, trained=False)
        copies = TiedBytes.of(self.rows, parted, whole) if parted else None
        return States(self.rows, tuple(whole), activations=None, tied=copies, **arrays)

    def _sums_of_prefixes(self, counts: NDArray[np.intp]) -> dict[str, Floats]:
        """Return the same as `_sums` of prefixes with these numbers of layers, in linear time."""
        num_layers = len(self.working)
        rank = np.full(len(self.rows), num_layers)  # of layers that compute; the loss ranks last
        rank[self.working] = np.arange(num_layers)

        def summed(values: Floats) -> Floats:
            return np.concatenate([[0.0], np.cumsum(values[self.working])])[counts]

        def between(first: Any, last: Any, num_bytes: Any) -> Floats:
            """Return, per state, the bytes whose first rank is inside the state and whose last rank is outside."""
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
        twice = [(rank[a], rank[b], size) for a, b, size in self._saved_twice if rank[a] < num_layers]
        return {
            **{name: summed(columns[name]) for name in SUMMED},
            **dict(zip(ONCE, map(summed, self._held), strict=True)),
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
        """[number of layers before a cut] parameter bytes of the first layer beyond the cut that has any."""
        own, found = self._gradient_bytes, np.zeros(len(self.working) + 1)
        for place, index in reversed([*enumerate(self.working)]):
            found[place] = own[index] or found[place + 1]
        return found

    def _sums(self, bits: NDArray[np.bool_]) -> dict[str, Floats]:
        """Return the arrays of some states by name, without the loss; `bits` is [state, layer] bool."""
        summed = bits.astype(float) @ np.stack([*(self._columns[name] for name in SUMMED), *self._held], 1)
        sources, targets, first_edge = self._edges
        crosses, is_read = np.zeros((2, *bits.shape), dtype=bool)
        if len(sources):
            read = bits[:, targets]
            crosses[:, sources[first_edge]] = np.logical_or.reduceat(bits[:, sources] & ~read, first_edge, axis=1)
            is_read[:, sources[first_edge]] = np.logical_or.reduceat(read, first_edge, axis=1)
        gradients, ends = self._gradient_bytes, bits & ~is_read
        beyond = ~bits & (gradients > 0)
        return {
            **dict(zip((*SUMMED, *ONCE), summed.T, strict=True)),
            "parted_bytes": parted(bits, self._saved_twice),
            "recomputed_bytes": np.zeros(len(bits)),
            "resumes": np.zeros(len(bits)),
            "sent_bytes": crosses @ self._columns["output_bytes"],
            "returned_bytes": crosses @ self._columns["gradient_bytes"],
            "antichain_bytes": ends @ self._columns["output_bytes"] + self._added_bytes(ends),
            "next_bytes": np.where(beyond.any(1), gradients[beyond.argmax(1)], 0.0),
        }

    def _added_bytes(self, ends: Iterable[NDArray[np.bool_]]) -> Floats | float:
        """Return the bytes that augment each state's antichain, given its last layers, [layer] bool.

        The artifact adds to a state's last layers every ancestor of one of them that has a reader which is not an
        ancestor of that last layer, nor the layer itself. These are the values that cross the cut, and also values with
        readers in two branches inside the state.
        """
        layers, added = self._added
        output_bytes = self._columns["output_bytes"][layers]
        return np.array([added[state].any(0) @ output_bytes for state in ends]) if len(layers) else 0.0

    @cached_property
    def _added(self) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Layers that the artifact may add, and [last layer, added layer] bool: which it adds for which last layer."""
        after = [0] * len(self.rows)  # every layer and all that depend on it
        adding = {}
        for index in reversed(self.working):
            shared = -1
            for reader in self.readers[index]:
                after[index] |= after[reader]
                shared &= after[reader]  # 0 for the loss, an ancestor of no layer: what it reads is always added
            if after[index] & ~shared:
                adding[index] = after[index] & ~shared
            after[index] |= 1 << index
        return np.array(list(adding), dtype=np.intp), layer_bits(list(adding.values()), len(self.rows)).T.copy()

    @cached_property
    def _edges(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Sources and targets of all edges, the loss included, in order of sources; and every source's first edge."""
        edges = [(index, reader) for index in self.working for reader in self.readers[index]]
        sources, targets = np.array(edges, dtype=np.intp).reshape(-1, 2).T
        return sources, targets, np.flatnonzero(np.diff(sources, prepend=-1))

    @cached_property
    def _saved_twice(self) -> list[tuple[int, int, int]]:
        return saved_twice(self.rows, [False] * len(self.rows))

    @cached_property
    def _columns(self) -> dict[str, Floats]:
        names = ("forward_s", "backward_s", "saved_bytes", "output_bytes", "gradient_bytes")
        columns = {name: np.array([getattr(row, name) for row in self.rows], dtype=float) for name in names}
        return {**columns, "num_loading": np.array([bool(row.inputs) for row in self.rows], dtype=float)}

    @cached_property
    def _held(self) -> Floats:
        """[kind, layer] bytes of parameters, kinds as in `ONCE`; a tied one counts at its first user."""
        seen: set[str] = set()
        held = np.zeros((len(ONCE), len(self.rows)))
        for index in self.working:
            fresh = {name: num_bytes for name, num_bytes in self.rows[index].held.items() if name not in seen}
            held[:, index] = [*map(sum, zip(ParameterBytes(), *fresh.values(), strict=True))]
            seen.update(fresh)
        return held

    @cached_property
    def _gradient_bytes(self) -> Floats:
        """[layer] parameter bytes; a tied one counts at its first user or, if stages may have copies, at every user."""
        return np.array([row.parameter_bytes for row in self.rows], dtype=float) if self.ties else self._held[0]
