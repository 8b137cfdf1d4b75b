"""Planning by brute force, written from the papers' formulas; shares no code with the planner.

A state is a set of layers, and a stage has the layers between two states. The time and the bytes of every plan are
added up layer by layer in plain Python numbers. Only small models can be planned like this.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from typing import NamedTuple

from pipebench.profile.model import LayerProfile

Rows = Sequence[LayerProfile]
State = frozenset[int]
EMPTY: State = frozenset()


class Link(NamedTuple):
    """The links of one level."""

    size: int  # components that they join
    goodput: float  # payload, bytes per second
    bandwidth: float  # of the wire, bytes per second
    latency_s: float  # per message


class Inner(NamedTuple):
    """A pipeline inside a component of the level below."""

    seconds: float  # per minibatch
    size: int  # components that the component consists of


class Memory(NamedTuple):
    """A device's memory, and how a mode uses it."""

    limit_bytes: float  # of a device
    versions: int | None  # weight versions; None for one per minibatch in flight
    again: frozenset[int]  # indices of the layers that are recomputed
    state_bytes_per_byte: int  # optimizer's state per byte of parameters
    in_flight: int | None  # minibatches; None for 1F1B's 1 + ceil(R / m)
    depth_at_most: int | None = None  # limit of the minibatches in flight
    shard: str = "none"  # what several replicas of a stage shard, as in `parallelism.shard`


# States.


def working(rows: Rows) -> list[int]:
    """Return the layers without the loss, the model's inputs and instances of `__getitem__` that no layer reads."""
    read = {index for row in rows for index in row.reads}
    return [
        index
        for index, row in enumerate(rows[:-1])
        if not row.is_input and (index in read or not row.kind.startswith("__getitem__"))
    ]


def in_order(rows: Rows, *, ties: bool = False) -> set[State]:
    """Return the prefixes of the order of execution; unless `ties`, only those that don't cut tied parameters."""
    order = working(rows)
    found = {frozenset(order[:count]) for count in range(len(order) + 1)}
    return found if ties else _together(rows, found)


def grown(rows: Rows, *, ties: bool = False) -> set[State]:
    """Return the artifact's states: those that grow from the first source by a reader of a member, with its closure.

    Unless `ties`, only those that don't cut tied parameters.
    """
    order = working(rows)
    found: set[State] = set()
    new = {_closure(rows, order[0])}
    while new:
        found |= new
        new = {
            state | _closure(rows, reader)
            for state in new
            for reader in order
            if reader not in state and state & set(rows[reader].reads)
        } - found
    found |= {EMPTY, frozenset(order)}
    return found if ties else _together(rows, found)


def _closure(rows: Rows, index: int) -> State:
    members, queue = set(), [index]
    while queue:
        members.add(queue.pop())
        queue += [read for member in members for read in rows[member].reads if read not in members]
    return frozenset(members) & frozenset(working(rows))


def _together(rows: Rows, states: set[State]) -> set[State]:
    order = working(rows)
    users = [
        {index for index in order if name in rows[index].parameters}
        for index in order
        for name in rows[index].parameters
    ]
    return {state for state in states if all(not group & state or group <= state for group in users)}


def crossing(rows: Rows, state: State) -> list[int]:
    """Return the layers of a state whose value is read outside, by the loss too; [] if the state cuts nothing."""
    whole = frozenset(working(rows))
    if state in (EMPTY, whole):
        return []
    outside = (whole - state) | {len(rows) - 1}
    return [index for index in state if any(index in rows[reader].reads for reader in outside)]


def augmented(rows: Rows, state: State) -> list[int]:
    """Return the layers whose values the artifact sends after a state; [] if the state cuts nothing.

    These are the state's last layers, and their predecessors with a reader that isn't a predecessor.
    """
    if state in (EMPTY, frozenset(working(rows))):
        return []
    last = {index for index in state if not any(index in rows[reader].reads for reader in state)}
    readers = [*working(rows), len(rows) - 1]
    added = {
        index
        for end in last
        for index in _closure(rows, end) - {end}
        if any(index in rows[reader].reads and reader not in _closure(rows, end) for reader in readers)
    }
    return sorted(last | added)


# Costs of stages.


@dataclass(frozen=True)
class Given:
    """A model to plan under a cost model."""

    rows: tuple[LayerProfile, ...]  # of the profile
    model: str  # name of the cost model
    update_s_per_byte: float = 0.0  # seconds of an update per byte of parameters
    update_floor_s: float = 0.0  # seconds of an update beside those
    load_s: float = 0.0  # seconds of loading a minibatch

    @cached_property
    def whole(self) -> State:
        return frozenset(working(self.rows))

    def layers(self, before: State, after: State) -> list[LayerProfile]:
        """Return the rows of a stage in order of execution; the loss belongs to the last one."""
        rows = [self.rows[index] for index in sorted(after - before)]
        return [*rows, self.rows[-1]] if after == self.whole else rows

    def weight_bytes(self, before: State, after: State) -> int:
        """Return the bytes of a stage's parameters, tied ones once."""
        sizes: dict[str, int] = {}
        for index in after - before:
            sizes |= self.rows[index].parameter_sizes
        return sum(sizes.values())

    def untrained_bytes(self, before: State, after: State) -> int:
        """Return the bytes of a stage's parameters that aren't trained, shared ones once."""
        names = {name for index in after - before for name in self.rows[index].untrained_sizes}
        return sum(
            next(row.untrained_sizes[name] for row in self.rows if name in row.untrained_sizes) for name in names
        )

    def sent_bytes(self, state: State) -> int:
        return sum(self.rows[index].output_bytes for index in crossing(self.rows, state))

    def returned_bytes(self, state: State) -> int:
        return sum(self.rows[index].gradient_bytes for index in crossing(self.rows, state))

    def stage_s(self, before: State, after: State, m: int, link: Link, *, first: bool, inner: Inner | None) -> float:
        """Return the seconds per minibatch of a stage.

        Args:
            before: the layers before the stage.
            after: the layers up to its end.
            m: number of its replicas, which are workers or components.
            link: between the replicas, and between stages.
            first: whether it is the first stage of its pipeline, which may be inside a component.
            inner: the pipeline inside each replica; None if replicas are workers.
        """
        inner_s = inner.seconds if inner else None
        layers = self.layers(before, after)
        compute_s = sum(row.forward_s + row.backward_s for row in layers) if inner_s is None else inner_s
        w = self.weight_bytes(before, after)
        if self.model == "sosp19":
            own_s = max(compute_s, 2 * (m - 1) * w / link.bandwidth) / m
            return own_s if first else max(own_s, 2 * self.sent_bytes(before) / link.bandwidth)
        if self.model == "artifact":
            summed_s = 4 * (m - 1) * w / (m * link.bandwidth)
            if first:
                return (compute_s + summed_s / (inner.size if inner else 1)) / m
            own_s = (compute_s + summed_s) / m
            cuts = (before, after)
            carried = [sum(self.rows[index].output_bytes for index in augmented(self.rows, cut)) for cut in cuts]
            return max(own_s, *(2 * num_bytes / (link.bandwidth * m) for num_bytes in carried))
        assert self.model == "overlap"
        return self._overlap_s(before, after, m, link, inner_s)

    def _overlap_s(self, before: State, after: State, m: int, link: Link, inner_s: float | None) -> float:
        layers, w, b = self.layers(before, after), self.weight_bytes(before, after), link.goodput
        sent, received = self.sent_bytes(after), self.sent_bytes(before)
        port_s = max(sent + self.returned_bytes(before), received + self.returned_bytes(after)) / b
        ring_s = 2 * (m - 1) / m * w / b  # of a round
        hops_s = 2 * (m - 1) * link.latency_s if w else 0.0
        if inner_s is not None:
            return max(inner_s, port_s + ring_s + hops_s) / m
        forward_s = sum(row.forward_s for row in layers)
        if w:
            forward_s += self.update_floor_s + self.update_s_per_byte * w
        backward_s = sum(row.backward_s for row in layers)
        there_and_back_s = (received + self.returned_bytes(before)) / b
        if there_and_back_s:
            there_and_back_s += 2 * link.latency_s
        late = min(w, max(self._next_bytes(before), 25 * 2**20 / 2))
        late_s = 2 * (m - 1) / m * late / b
        loads = self.load_s if any(row.inputs for row in layers) else 0.0
        round_s = forward_s + backward_s + there_and_back_s + late_s + hops_s
        return max(round_s, max(forward_s, port_s) + ring_s + hops_s, loads) / m

    def _next_bytes(self, before: State) -> int:
        """Return the parameter bytes of a stage's first layer that has any, which gets its gradient last."""
        own = [self.rows[index].parameter_bytes for index in sorted(self.whole - before)]
        return next((num_bytes for num_bytes in own if num_bytes), 0)

    def num_bytes(self, before: State, after: State, in_flight: int, memory: Memory, m: int = 1) -> Fraction:
        """Return the bytes of one of m replicas: weight versions, gradients, optimizer state, activations, buffers."""
        w, last = self.weight_bytes(before, after), len(self.rows) - 1
        again = memory.again | ({last} if last - 1 in memory.again else frozenset())
        own = sorted(after - before) + ([last] if after == self.whole else [])
        first = min(own)
        repeated = sum(self.rows[index].saved_bytes for index in own if index in again)
        saved = sum(self.rows[index].saved_bytes for index in own if index not in again)
        for index in own:
            run = index  # the first of the layers that are recomputed together with this one
            while index in again and run - 1 in again:
                run -= 1
            earlier = {read for other in range(run, index) for read in self.rows[other].reads}
            if index in again:
                reads = {read for read in self.rows[index].reads if read < run}
                saved += sum(self.rows[read].output_bytes for read in reads - earlier)
        for index, row in enumerate(self.rows):
            for holder, num_bytes in row.saved_with:
                if index in again:
                    continue
                if holder in again:
                    saved += num_bytes * (index in own)  # the holder doesn't keep it
                elif holder in before and index not in before:
                    saved += num_bytes  # every stage between the holder and this layer keeps it
        received, sent = self.sent_bytes(before), self.sent_bytes(after)
        versions = in_flight if memory.versions is None else memory.versions
        parted = received if first in again and (first == 0 or first - 1 in again) else 0
        kept = in_flight * (saved + parted) + repeated
        stage = ["none", "optimizer", "gradients", "parameters"].index(memory.shard)
        state, gradient, weights = (Fraction(1, m) if stage >= number else Fraction(1) for number in (1, 2, 3))
        states = weights * versions * w + gradient * w + state * memory.state_bytes_per_byte * w
        return self.untrained_bytes(before, after) + states + kept + 2 * received + 2 * sent

    def fits(self, before: State, after: State, m: int, waiting: Fraction, memory: Memory | None) -> bool:
        """Return whether one of m replicas fits in memory, with `waiting` workers behind the stage."""
        if memory is None:
            return True
        in_flight = 1 + math.ceil(waiting / m)
        if memory.depth_at_most is not None:
            in_flight = min(in_flight, memory.depth_at_most)
        if memory.in_flight is not None:
            in_flight = memory.in_flight
        return self.num_bytes(before, after, in_flight, memory, m) <= memory.limit_bytes


# Search.


@dataclass(frozen=True)
class Search:
    """Tries every plan of a model with cuts at the given states."""

    given: Given
    states: frozenset[State]
    memory: Memory | None = None

    def flat(self, link: Link, width: int | None = None) -> list[float]:
        """Return the smallest bottleneck with exactly n workers, for n from 0 to all; infinite if nothing fits."""
        best = [math.inf] * (link.size + 1)
        for bottleneck_s, workers in self._plans(link, EMPTY, self.given.whole, width):
            best[workers] = min(best[workers], bottleneck_s)
        return best

    def _plans(self, link: Link, before: State, after: State, width: int | None) -> Iterator[tuple[float, int]]:
        @cache
        def stage_s(start: State, stop: State, m: int) -> float:
            return self.given.stage_s(start, stop, m, link, first=start == before, inner=None)

        @cache
        def fits(start: State, stop: State, m: int, behind: int) -> bool:
            return self.given.fits(start, stop, m, Fraction(behind), self.memory)

        def extended(stop: State, bottleneck_s: float, behind: int) -> Iterator[tuple[float, int]]:
            if stop == before:
                yield bottleneck_s, behind
                return
            for start in self._inside(before, stop):
                for m in [width] if width else range(1, link.size - behind + 1):
                    if m <= link.size - behind and fits(start, stop, m, behind):
                        yield from extended(start, max(bottleneck_s, stage_s(start, stop, m)), behind + m)

        return extended(after, 0.0, 0)

    def hierarchical(self, links: Sequence[Link]) -> float:
        """Return the smallest bottleneck by the paper's recurrence; infinite if nothing fits. Innermost link first."""
        sizes = [math.prod(link.size for link in links[:level]) for level in range(len(links))]

        @cache
        def pipeline_s(level: int, before: State, after: State, waiting: Fraction) -> float:
            """Try every pipeline inside one component; `waiting` are the workers behind it, per replica."""

            def extended(stop: State, behind: int) -> float:
                if stop == before:
                    return 0.0
                best_s = math.inf
                for start in self._inside(before, stop):
                    for m in range(1, links[level].size - behind + 1):
                        own_s = stage_s(level, start, stop, m, behind * sizes[level] + waiting, start == before)
                        if own_s < math.inf:
                            best_s = min(best_s, max(own_s, extended(start, behind + m)))
                return best_s

            return extended(after, 0)

        @cache
        def stage_s(level: int, start: State, stop: State, m: int, waiting: Fraction, first: bool) -> float:
            if level == 0:
                if not self.given.fits(start, stop, m, waiting, self.memory):
                    return math.inf
                return self.given.stage_s(start, stop, m, links[0], first=first, inner=None)
            inner = Inner(pipeline_s(level - 1, start, stop, waiting / m), links[level - 1].size)
            return self.given.stage_s(start, stop, m, links[level], first=first, inner=inner)

        return pipeline_s(len(links) - 1, EMPTY, self.given.whole, Fraction(0))

    @cached_property
    def _parts(self) -> dict[State, list[State]]:
        return {upper: [state for state in self.states if state < upper] for upper in self.states}

    def _inside(self, lower: State, upper: State) -> list[State]:
        """Return the states that contain `lower` and at which a last stage up to `upper` may start."""
        return [state for state in self._parts[upper] if lower <= state]


class Placed(NamedTuple):
    """A stage with its placement."""

    before: State  # layers before it
    after: State  # layers up to its end
    workers: tuple[int, ...]  # of its replicas, in order


def placed_s(search: Search, links: Sequence[Link], stages: Sequence[Placed], waiting: Fraction = Fraction(0)) -> float:
    """Return the bottleneck of a placed plan by the recurrence; infinite if it doesn't fit in memory.

    Minibatch k runs on replica k mod r of each stage, and has to stay in one component while stages share components.
    """
    *inner_links, link = links
    size = math.prod(each.size for each in inner_links)
    groups: dict[frozenset[int], list[Placed]] = {}  # stages that share components are one stage of this level
    for stage in stages:
        groups.setdefault(frozenset(worker // size for worker in stage.workers), []).append(stage)
    taken = [component for components in groups for component in components]
    assert len(taken) == len(set(taken)), "components shared by stages that share not all of them"
    assert all(0 <= component < link.size for component in taken)
    bottleneck_s, behind = 0.0, 0
    for components, group in reversed(groups.items()):
        m, first = len(components), group[0] is stages[0]
        before, after = group[0].before, group[-1].after
        left = (behind * size + waiting) / m
        behind += m
        if inner_links:
            inner_s = placed_s(search, inner_links, _within(group, m, size), left)
            inner: Inner | None = Inner(inner_s, inner_links[-1].size)
        else:
            inner = None
            assert len(group) == 1
            assert len(group[0].workers) == m
            if not search.given.fits(before, after, m, left * m, search.memory):
                return math.inf
        own_s = search.given.stage_s(before, after, m, link, first=first, inner=inner)
        bottleneck_s = max(bottleneck_s, own_s)
    return bottleneck_s


def _within(group: Sequence[Placed], m: int, size: int) -> list[Placed]:
    """Return the stages inside one of m equal components; replica q has to be in component q mod m."""
    order = [worker // size for worker in group[0].workers[:m]]
    inner = []
    for stage in group:
        assert [worker // size for worker in stage.workers] == [order[q % m] for q in range(len(stage.workers))]
        per_component = {tuple(worker % size for worker in stage.workers[c::m]) for c in range(m)}
        assert len(per_component) == 1, "components differ"
        inner.append(stage._replace(workers=per_component.pop()))
    return inner
