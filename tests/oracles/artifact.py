"""The planner published with PipeDream, restated step by step; shares no code with pipebench's planner.

A state is an antichain: the last layers of a prefix of the graph. It costs as much as its members and all their
predecessors, and sends the outputs of its augmented antichain. Stages are found by dynamic programming over states and
machines, level by level, with uncompressed activations (compression ratio 1). Infinity marks pairs of states between
which there is no stage.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from pipebench.profile.model import LayerProfile

Antichain = tuple[int, ...]
# Seconds and machines per stage of the best pipeline, by the indices of the first and last state in it, and machines.
_Answers = dict[tuple[int, int, int], tuple[float, tuple[int, ...]]]


class Machines(NamedTuple):
    """A level of the cluster."""

    size: int  # machines, or components of the level below, that the links join
    bandwidth: float  # of the links, bytes per second


class Found(NamedTuple):
    """The optimizer's answer."""

    seconds: float  # per minibatch
    machines: tuple[int, ...]  # of every stage, in components of the outermost level


class Optimizer:
    """The states of a model and the plans between them."""

    def __init__(self, rows: Sequence[LayerProfile]) -> None:
        read = {index for row in rows for index in row.reads}
        self.rows = rows
        self.nodes = [
            index
            for index, row in enumerate(rows[:-1])
            if not row.is_input and (index in read or not row.kind.startswith("__getitem__"))
        ]
        self.edges = {node: [other for other in self.nodes if node in rows[other].reads] for node in self.nodes}
        self.before = {node: self._before(node) for node in self.nodes}
        self.after = {node: {other for other in self.nodes if node in self.before[other]} for node in self.nodes}

    def _before(self, node: int) -> set[int]:
        found: set[int] = set()
        queue = [read for read in self.rows[node].reads if read in self.nodes]
        while queue:
            other = queue.pop()
            found.add(other)
            queue += [read for read in self.rows[other].reads if read in self.nodes and read not in found]
        return found

    def members(self, antichain: Antichain) -> frozenset[int]:
        return frozenset(antichain).union(*(self.before[node] for node in antichain))

    def augmented(self, antichain: Antichain) -> Antichain:
        """Return an antichain and every predecessor of a member with a reader that's no predecessor of that member."""
        added = {
            predecessor
            for node in antichain
            for predecessor in self.before[node]
            for reader in self.edges[predecessor]
            if reader not in self.before[node] and reader != node
        }
        return (*sorted(added), *antichain)

    def following(self, antichain: Antichain) -> list[Antichain]:
        """Return the antichains in which one layer is replaced by one of its readers."""
        found = []
        augmented = self.augmented(antichain)
        for node in augmented:
            for reader in self.edges[node]:
                if reader in antichain or self.after[reader] & {*augmented}:
                    continue
                replaced = dict.fromkeys(reader if each == node else each for each in augmented)
                found.append(tuple(each for each in replaced if not self.after[each] & {*replaced}))
        return found

    @cached_property
    def states(self) -> list[Antichain]:
        """The states in topological order: each after those that it grew from."""
        source = next(node for node in self.nodes if not self.before[node])
        grown: dict[frozenset[int], list[frozenset[int]]] = {}
        named: dict[frozenset[int], Antichain] = {frozenset((source,)): (source,)}
        queue: list[Antichain] = [(source,)]
        while queue:
            antichain = queue.pop(0)
            if frozenset(antichain) in grown:
                continue
            following = self.following(antichain)
            grown[frozenset(antichain)] = [frozenset(each) for each in following]
            for each in following:
                named.setdefault(frozenset(each), each)
            queue += following
        order: list[frozenset[int]] = []

        def visit(state: frozenset[int]) -> None:
            if state not in order:
                for each in grown[state]:
                    visit(each)
                order.insert(0, state)

        visit(frozenset((source,)))
        return [named[state] for state in order]

    @cached_property
    def layers(self) -> list[frozenset[int]]:
        return [self.members(state) for state in self.states]

    @cached_property
    def parts(self) -> list[list[int]]:
        return [[k for k, part in enumerate(self.layers) if part < layers] for layers in self.layers]

    @cached_property
    def sent_bytes(self) -> list[float]:
        return [sum(self.rows[node].output_bytes for node in self.augmented(state)) for state in self.states]

    def _between(self, values: Sequence[float]) -> list[list[float]]:
        """Return [i][j]: the value of state j less that of state i - 1, infinity if j < i."""
        rows = [list(values)]
        for i in range(1, len(values) + 1):
            rows.append([values[j] - values[i - 1] if j > i - 1 else math.inf for j in range(len(values))])
        return rows

    def best(self, levels: Sequence[Machines], *, fewer: bool, literal: bool = False) -> Found:
        """Return the optimizer's answer.

        Args:
            levels: of the cluster, innermost first.
            fewer: whether machines may stay unused, as with `--use_fewer_machines`.
            literal: whether to reproduce two faults of the published code: inside a component it combines states of
                which one doesn't contain the other, and a stage of a single state leaves no machine unused.
        """
        last = len(self.layers) - 1
        rows = [[self.rows[node] for node in state] for state in self.layers]
        seconds = self._between([sum(row.forward_s + row.backward_s for row in state) for state in rows])
        parameter_bytes = self._between([sum(row.parameter_bytes for row in state) for state in rows])
        if not literal:
            seconds = [
                [value if i == 0 or self.layers[i - 1] < self.layers[j] else math.inf for j, value in enumerate(row)]
                for i, row in enumerate(seconds)
            ]
        answers: _Answers = {}
        machines_below = 1
        for depth, level in enumerate(levels):
            starts = range(1 if depth == len(levels) - 1 else last + 1)
            answers = self._one_stage(seconds, parameter_bytes, level, machines_below, starts)
            self._split(answers, seconds, parameter_bytes, level, starts, fewer=fewer, literal=literal)
            if depth < len(levels) - 1:
                seconds = [
                    [answers[i, j, level.size][0] if i <= j else math.inf for j in range(last + 1)]
                    for i in range(last + 1)
                ]
            machines_below = level.size
        return Found(*answers[0, last, levels[-1].size])

    def _one_stage(
        self,
        seconds: list[list[float]],
        parameter_bytes: list[list[float]],
        level: Machines,
        machines_below: int,
        starts: range,
    ) -> _Answers:
        """Return the seconds of the layers between any two states as one stage, on any number of a level's machines."""
        answers: _Answers = {}
        for i in starts:
            for j in range(i, len(self.layers)):
                for m in range(1, level.size + 1):
                    summed_s = 4 * (m - 1) * parameter_bytes[i][j] / (level.bandwidth * m) / machines_below
                    answers[i, j, m] = (seconds[i][j] + summed_s) / m, (m,)
        return answers

    def _split(
        self,
        answers: _Answers,
        seconds: list[list[float]],
        parameter_bytes: list[list[float]],
        level: Machines,
        starts: range,
        *,
        fewer: bool,
        literal: bool,
    ) -> None:
        """Improve the answers of a level by splitting off a last stage, in order of the number of machines."""
        bandwidth, last = level.bandwidth, len(self.layers) - 1
        for i in starts:
            for m in range(2, level.size + 1):
                for j in range(i + 1 if literal else i, last + 1):
                    found = answers[i, j, m]
                    if fewer:
                        found = min(found, answers[i, j, m - 1], key=lambda each: each[0])
                    for k in self.parts[j]:
                        if k < i or (i > 0 and k in self.parts[i - 1]):
                            continue
                        for own in range(1, m):
                            stage_s = seconds[k + 1][j]
                            stage_s = (stage_s + 4 * (own - 1) * parameter_bytes[k + 1][j] / (bandwidth * own)) / own
                            ways_s = [2 * self.sent_bytes[cut] / (bandwidth * own) for cut in (k, j) if cut < last]
                            earlier_s, earlier = answers[i, k, m - own]
                            value = max(earlier_s, stage_s, *ways_s)
                            if value < found[0]:
                                found = value, (*earlier, own)
                    answers[i, j, m] = found

    def plan_s(self, stages: Sequence[tuple[frozenset[int], int]], machines: Machines) -> float:
        """Return the seconds per minibatch of a flat plan, given the layers and machines of every stage."""
        sent = {self.members(state): state for state in self.states}
        done: frozenset[int] = frozenset()
        worst, bandwidth = 0.0, machines.bandwidth
        for layers, m in stages:
            rows = [self.rows[node] for node in layers]
            weights = sum(row.parameter_bytes for row in rows)
            own_s = (sum(row.forward_s + row.backward_s for row in rows) + 4 * (m - 1) * weights / (bandwidth * m)) / m
            worst = max(worst, own_s)
            cuts = [cut for cut in (done, done | layers) if done and cut != frozenset(self.nodes)]
            for cut in cuts:
                num_bytes = sum(self.rows[node].output_bytes for node in self.augmented(sent[cut]))
                worst = max(worst, 2 * num_bytes / (bandwidth * m))
            done |= layers
        assert done == frozenset(self.nodes)
        return worst
