"""Layers as a graph to be partitioned: seconds per layer and bytes per edge."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipebench.profile.model import LayerProfile

Edge = tuple[int, int, int]  # a layer, a later one that reads it, bytes


@dataclass(frozen=True)
class TimedGraph:
    """Layers in order of execution."""

    seconds: tuple[float, ...]  # forward and backward of every layer
    edges: tuple[Edge, ...]  # between a layer and its readers

    def __len__(self) -> int:
        return len(self.seconds)

    @cached_property
    def neighbours(self) -> tuple[Mapping[int, int], ...]:
        """Bytes by neighbour, per layer."""
        found: list[dict[int, int]] = [{} for _ in self.seconds]
        for source, target, num_bytes in self.edges:
            found[source][target] = found[source].get(target, 0) + num_bytes
            found[target][source] = found[target].get(source, 0) + num_bytes
        return tuple(found)

    def cut_bytes(self, part_of: Sequence[int]) -> int:
        """Return the bytes of edges between parts, given the part of every layer."""
        return sum(num_bytes for source, target, num_bytes in self.edges if part_of[source] != part_of[target])

    def time(self, layers: Iterable[int]) -> float:
        """Return the seconds of some layers together."""
        return sum(self.seconds[layer] for layer in layers)


def timed_graph(rows: Sequence[LayerProfile], seconds: Sequence[float] | None = None) -> TimedGraph:
    """Return a profile's layers as a graph; the loss, last in `rows`, is part of the last layer.

    Measured `seconds` per row, forward and backward together, replace the profile's.
    """
    each = [row.forward_s + row.backward_s for row in rows] if seconds is None else [*seconds]
    edges = [
        (source, index, rows[source].output_bytes + rows[source].gradient_bytes)
        for index, row in enumerate(rows[:-1])
        for source in row.reads
    ]
    return TimedGraph((*each[:-2], each[-2] + each[-1]), tuple(edges))
