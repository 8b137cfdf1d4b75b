"""A profile as a layer graph and a data set, to plan and simulate a model of which only the costs are known."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from pipebench.model.graph import Layer, LayerGraph
from pipebench.profile.model import LayerProfile, Profile, in_order
from pipebench.zoo.registry import Dataset


def work_of(profile: Profile) -> Profile:
    """Return a profile without the rows that are no work: model inputs, and `__getitem__`s that no layer reads."""
    return profile.with_rows(_working)


def _working(rows: Sequence[LayerProfile]) -> tuple[LayerProfile, ...]:
    """Return the rows that are work, with the indices that they have among each other."""
    read = {index for row in rows for index in row.reads}
    working = [
        index
        for index, row in enumerate(rows)
        if not row.is_input and (index in read or not row.kind.startswith("__getitem__"))
    ]
    return in_order(rows, working)


def graph_of(rows: Sequence[LayerProfile]) -> LayerGraph:
    """Return a graph with one layer per row, except the last row, the loss; its layers can't be executed."""
    *layers, loss = rows
    graph = fx.Graph()
    nodes = [graph.call_function(_unknown) for _ in layers]
    made = tuple(
        Layer(index, row.name, row.kind, node, row.reads, row.inputs, row.parameters, row.buffers)
        for index, (row, node) in enumerate(zip(layers, nodes, strict=True))
    )
    graph.output(tuple(nodes[index] for index in loss.reads))
    inputs = tuple(dict.fromkeys(name for row in layers for name in row.inputs))
    traced = LayerGraph(
        nn.Module(), nn.Module(), graph, inputs, made, loss.reads, evaluation_map=tuple(range(len(made)))
    )
    return replace(traced, evaluation=traced)


def _unknown() -> None:
    raise AssertionError("nothing is known of a profile's layers but their costs")


class InputsOf(Dataset):
    """The data set of a model that is only a profile: `data` gives counts and metrics, `profile` the inputs' sizes."""

    targets: Sequence[str] = ()

    def __init__(self, data: Dataset, profile: Profile, inputs: Sequence[str]) -> None:
        self.inputs, self.metrics = tuple(inputs), data.metrics
        self.num_train, self.num_eval, self.sequential = data.num_train, data.num_eval, data.sequential
        self.lengths, self._data, self._profile = data.lengths, data, profile
        self._bytes = {
            size: {row.name: row.output_bytes for row in rows if row.is_input} for size, rows in profile.layers.items()
        }

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return meta tensors of the inputs' bytes; 0 bytes where the profile doesn't know them."""
        sizes = self._bytes.get(num_samples, {})
        return {name: torch.empty(sizes.get(name, 0), dtype=torch.uint8, device="meta") for name in self.inputs}

    def of_length(self, columns: int) -> Dataset:
        """Return the data with inputs of one of the profile's lengths."""
        layers = next(each.layers for each in self._profile.lengths if each.columns == columns)
        return InputsOf(self._data, replace(self._profile, layers=layers), self.inputs)

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Refuse: nothing is trained."""
        raise NotImplementedError("a model that is a profile reads no data")

    def loss(self, output: object, targets: object) -> torch.Tensor:
        """Refuse: nothing is trained."""
        raise NotImplementedError("a model that is a profile has no outputs")
