"""A graph to be cut in parts: layers by the time they take, joined by what they send each other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipebench.profile.model import LayerProfile

Edge = tuple[int, int, int]  # a layer, a later one that reads it, bytes


@dataclass(frozen=True)
class TimedGraph:
    """Layers in the order of their time stamps, which is that of execution.

    Attributes:
        seconds: of every layer, forward and backward together.
        edges: who reads whom, and bytes.
    """

    seconds: tuple[float, ...]
    edges: tuple[Edge, ...]

    def __len__(self) -> int:
        return len(self.seconds)

    @cached_property
    def neighbours(self) -> tuple[Mapping[int, int], ...]:
        """Of every layer, those it is joined to, and by how many bytes."""
        found: list[dict[int, int]] = [{} for _ in self.seconds]
        for source, target, num_bytes in self.edges:
            found[source][target] = found[source].get(target, 0) + num_bytes
            found[target][source] = found[target].get(source, 0) + num_bytes
        return tuple(found)

    def cut_bytes(self, part_of: Sequence[int]) -> int:
        """Return the bytes of all edges that join different parts.

        Args:
            part_of: the part of every layer.
        """
        return sum(num_bytes for source, target, num_bytes in self.edges if part_of[source] != part_of[target])

    def time(self, layers: Iterable[int]) -> float:
        """Return the seconds that some layers take together."""
        return sum(self.seconds[layer] for layer in layers)


def timed_graph(rows: Sequence[LayerProfile], seconds: Sequence[float] | None = None) -> TimedGraph:
    """Return a profile's layers as a graph; the loss belongs to the last of them.

    Args:
        rows: the layers and, last, the loss.
        seconds: what each row takes, forward and backward, where something else was measured than the profile says.
    """
    each = [row.forward_s + row.backward_s for row in rows] if seconds is None else [*seconds]
    edges = [
        (source, index, rows[source].output_bytes + rows[source].gradient_bytes)
        for index, row in enumerate(rows[:-1])
        for source in row.reads
    ]
    return TimedGraph((*each[:-2], each[-2] + each[-1]), tuple(edges))
